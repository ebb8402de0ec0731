"""Integrations: trainers and dashboards of others."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="integrations",
    needs=("track",),
)
