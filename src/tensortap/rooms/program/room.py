"""Program: `tensortap run`, which tracks a training program without a change to it."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="program",
    needs=("health", "track"),
    commands={"run": "tensortap.rooms.program.command:run"},
)
