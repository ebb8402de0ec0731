"""The parts of JAX arrays that are spread over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tensortap.core.errors import CaptureError
from tensortap.core.record import Shard
from tensortap.rooms.align.digest import Piece, Weight


def named_tensors(model: Any) -> None:
    """Return None: trees of arrays are walked like those of any framework."""
    return


def pieces(tensor: Any) -> list[Piece] | None:
    """Return one part per device of an array that several devices share; None for others."""
    if not isinstance(tensor, jax.Array) or isinstance(tensor, jax.core.Tracer):
        return None
    if not tensor.is_fully_addressable:
        raise CaptureError("other processes have parts of it: digest it where all of it is")
    if len(tensor.sharding.device_set) == 1:
        return None
    found = []
    for shard in tensor.addressable_shards:
        if shard.replica_id == 0:
            offsets = tuple(each.start or 0 for each in shard.index)
            found.append(Piece(shard.data, Shard(tuple(tensor.shape), offsets)))
    return found


def sum_over_ranks(weights: Sequence[Weight]) -> None:
    """Do nothing: all parts are in this process."""
