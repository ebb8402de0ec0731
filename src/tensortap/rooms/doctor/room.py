"""Doctor: what is installed, whether a session answers, and whether a device does its part."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="doctor",
    needs=("track",),
    commands={"doctor": "tensortap.rooms.doctor.command:doctor"},
)
