"""Analyses: norms, updates, noise, activations, attention and experts of training steps."""

from __future__ import annotations

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="analyses",
    needs=("figures", "track"),
    tabs=(Tab("analyses.js", 55),),
    routes="tensortap.rooms.analyses.routes:ROUTES",
    offers={
        "track.option.analyses": "tensortap.rooms.analyses.analysis:Analyses",
        "run.metrics": "tensortap.rooms.analyses.norms:with_whole_norms",
    },
)
