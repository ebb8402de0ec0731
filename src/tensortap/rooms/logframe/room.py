"""LogFrame: the pandas frame of tensor statistics that other tools read and write, too."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="logframe",
    offers={
        "run.logframe": "tensortap.rooms.logframe.frame:logframe_of",
        "table.frame rows": "tensortap.rooms.logframe.read:FrameSource",
    },
)
