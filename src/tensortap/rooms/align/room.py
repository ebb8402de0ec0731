"""Align: do a trainer and an inference engine hold the same weights and compute the same?"""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="align",
    needs=("compare", "track"),
    offers={
        "compare.kinds": "tensortap.rooms.align.weights:DIGESTS",
        "compare.tolerance": "tensortap.rooms.align.tolerance:compare_with_noise",
        "session.watchers": "tensortap.rooms.align.watch:watch_digests",
    },
)
