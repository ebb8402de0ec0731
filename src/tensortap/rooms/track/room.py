"""Track: the numerics of a whole model."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="track",
)
