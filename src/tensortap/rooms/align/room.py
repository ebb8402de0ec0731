"""Align: do a trainer and an inference engine hold the same weights and compute the same?"""

from __future__ import annotations

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="align",
    needs=("compare", "figures", "report", "track"),
    commands={"align": "tensortap.rooms.align.command:align"},
    tabs=(Tab("align.js", 75),),
    routes="tensortap.rooms.align.routes:ROUTES",
    offers={
        "catch.tokens": "tensortap.rooms.align.tokens:catch_tokens",
        "compare.kinds": "tensortap.rooms.align.weights:DIGESTS",
        "compare.tolerance": "tensortap.rooms.align.tolerance:compare_with_noise",
        "session.watchers": "tensortap.rooms.align.watch:watch_digests",
        "track.option.tokens": "tensortap.rooms.align.torch.by_token:ByToken",
    },
)
