"""Align: do a trainer and an inference engine hold the same weights and compute the same?"""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="align",
    needs=("compare", "track"),
    offers={
        "catch.tokens": "tensortap.rooms.align.tokens:catch_tokens",
        "track.option.tokens": "tensortap.rooms.align.torch.by_token:ByToken",
    },
)
