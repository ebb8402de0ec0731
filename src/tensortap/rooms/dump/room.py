"""Dump: one plain file per object, in the folder of the run."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(name="dump")
