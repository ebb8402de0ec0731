"""Demo: two trainings, one with bugs, and how to find them."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="demo",
    needs=("compare", "figures", "report", "track"),
    commands={"demo": "tensortap.rooms.demo.command:demo"},
)
