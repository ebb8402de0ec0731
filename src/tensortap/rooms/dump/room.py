"""Dump: one plain file per object, in the folder of the run."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="dump",
    offers={
        "dump.load_file": "tensortap.rooms.dump.files:load_file",
        "dump.save_file": "tensortap.rooms.dump.files:save_file",
    },
)
