"""Bisect: the module whose fault a difference is."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="bisect",
    needs=("blackbox", "compare", "reasons", "track"),
    offers={"track.hooks": "tensortap.rooms.bisect.tracked:bisected"},
    commands={"bisect": "tensortap.rooms.bisect.command:bisect"},
)
