"""Black box: keep a step, run it again, and say what happened in it."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="blackbox",
    needs=("ops", "track"),
)
