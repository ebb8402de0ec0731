"""Compare: values, files and runs, and what differs first."""

from __future__ import annotations

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="compare",
    needs=("dump", "figures", "report"),
    commands={"compare": "tensortap.rooms.compare.command:compare"},
    tabs=(Tab("compare.js", 70),),
    routes="tensortap.rooms.compare.routes:ROUTES",
)
