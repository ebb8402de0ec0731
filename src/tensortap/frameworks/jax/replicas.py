"""Arrays of a JAX program of which other processes have replicas.

The sharding of an array over the devices of several processes says so. Of an array on the devices
of one process it is assumed, and up to whoever compares them to find out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tensortap.frameworks.observing import Observed, ReplicatedTensor
from tensortap.ranks import rank_and_world_size
from tensortap.record import Shard


def replicas_of(observed: Observed, array: Any) -> Iterator[ReplicatedTensor]:
    """Yield the parts of an array that other processes have as well."""
    if not np.size(array):
        return
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        yield ReplicatedTensor(observed, array, tuple(range(rank_and_world_size()[1])), False)
        return
    processes: dict[Any, set[int]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        processes.setdefault(_offsets(index), set()).add(device.process_index)
    parts = {_offsets(each.index): each.data for each in array.addressable_shards}
    for offsets, part in parts.items():
        ranks = tuple(sorted(processes[offsets]))
        if len(ranks) < 2:
            continue
        found = observed
        if part.shape != array.shape:
            shard = Shard(tuple(array.shape), offsets)
            name = observed.name if len(parts) == 1 else f"{observed.name}{list(offsets)}"
            found = observed._replace(name=name, shape=tuple(part.shape), shard=shard)
        yield ReplicatedTensor(found, part, ranks, True)


def _offsets(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(each.start or 0 for each in index)
