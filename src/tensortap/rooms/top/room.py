"""Top: a live session in the terminal."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(name="top", commands={"top": "tensortap.rooms.top.command:top"})
