"""Integrations: trainers and dashboards of others."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="integrations",
    needs=("logframe", "track"),
    offers={
        "run.to_tensorboard": "tensortap.rooms.integrations.tensorboard:export",
        "run.to_wandb": "tensortap.rooms.integrations.wandb:export",
    },
)
