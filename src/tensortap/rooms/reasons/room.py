"""Reasons: simple explanations why two tensors differ."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="reasons",
    needs=("compare",),
    offers={"compare.reasons": "tensortap.rooms.reasons.around:reasons"},
)
