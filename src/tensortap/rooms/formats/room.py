"""Formats: what tensors would lose in another number format, from their exponents."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="formats",
    needs=("logframe",),
    offers={"run.formats": "tensortap.rooms.formats.losses:formats_of"},
)
