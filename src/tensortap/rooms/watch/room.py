"""Watch: your own code on live tensors, in a worker process."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(name="watch", needs=("track",))
