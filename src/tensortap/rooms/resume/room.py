"""Resume: does a program that goes on from its checkpoint compute the same?"""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="resume",
    needs=("program", "track"),
    commands={"resume-check": "tensortap.rooms.resume.command:resume_check"},
)
