"""Export: a run as one file, or as a folder of plain ones."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="export",
    commands={"export": "tensortap.rooms.export.command:export"},
    offers={"run.export": "tensortap.rooms.export.export:export"},
)
