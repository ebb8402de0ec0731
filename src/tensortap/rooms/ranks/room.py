"""Ranks: where replicas differ, and which rank is unlike the others."""

from __future__ import annotations

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="ranks",
    needs=("figures",),
    commands={"ranks": "tensortap.rooms.ranks.command:ranks"},
    tabs=(Tab("ranks.js", 60),),
    routes="tensortap.rooms.ranks.routes:ROUTES",
    offers={
        "run.alerts": "tensortap.rooms.ranks.findings:GrowingFindings",
        "run.alerts.told": "tensortap.rooms.ranks.received:with_sources",
        "run.ranks": "tensortap.rooms.ranks.findings:rank_findings",
        "session.watchers": "tensortap.rooms.ranks.watch:watch_ranks",
    },
)
