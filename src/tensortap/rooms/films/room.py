"""Films: tensors that move, from a run or while a program trains."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="films",
    needs=("figures",),
    commands={"film": "tensortap.rooms.films.command:film"},
    offers={"run.film": "tensortap.rooms.films.recorder:film"},
)
