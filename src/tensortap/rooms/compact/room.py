"""Compact: rewrite the sealed parts of a run as sorted windows with a roll-up of whole tensors."""

from __future__ import annotations

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="compact",
    commands={"compact": "tensortap.rooms.compact.command:compact"},
    tabs=(Tab("compaction.js", 95),),
    routes="tensortap.rooms.compact.routes:ROUTES",
    offers={
        "run.compact": "tensortap.rooms.compact.compact:compact_run",
        "executor.dask": "tensortap.rooms.compact.command:dask_executor",
    },
)
