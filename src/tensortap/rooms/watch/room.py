"""Watch: tensors in a worker process, and films of them."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="watch",
    needs=("figures", "track"),
    commands={"film": "tensortap.rooms.watch.command:film"},
    offers={"run.film": "tensortap.rooms.watch.films.film:film"},
)
