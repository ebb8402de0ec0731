"""Compare: values, files and runs, and what differs first."""

from __future__ import annotations

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="compare",
    needs=("figures",),
    commands={"compare": "tensortap.cli.compare:compare"},
    tabs=(Tab("compare.js", 60),),
    routes="tensortap.web.routes.compare:ROUTES",
)
