"""Assembles a tensor from the shards and replicas that ranks recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from tensortap.core.record import Record


class Disagreement(ValueError):
    """Replicas of a tensor differ, or shards do not form a whole."""


def assemble(parts: Iterable[tuple[Record, Any]]) -> Any:
    """Return one array from the records of several ranks and their arrays.

    >>> from tensortap.core.record import Kind, Shard
    >>> first, second = (
    ...     Record(
    ...         "w", Kind.WEIGHT, 0, 0, 0, rank, 2, 0, shape=(2,), shard=Shard((4,), (2 * rank,))
    ...     )
    ...     for rank in (0, 1)
    ... )
    >>> assemble([(first, np.array([1, 2])), (second, np.array([3, 4]))])
    array([1, 2, 3, 4])
    """
    ordered = sorted(parts, key=lambda part: part[0].rank)
    if any(record.shard is not None for record, _ in ordered):
        return _assembled(ordered)
    (first, array), *others = ordered
    for record, other in others:
        if (array.dtype, array.shape) != (other.dtype, other.shape) or (
            array.tobytes() != other.tobytes()
        ):
            raise Disagreement(f"the replicas of ranks {first.rank} and {record.rank} differ")
    return array


def _assembled(parts: list[tuple[Record, Any]]) -> Any:
    shape: tuple[int, ...] = next(r.shard.global_shape for r, _ in parts if r.shard is not None)
    size = math.prod(shape)
    lacking = size - sum(math.prod(record.shape) for record, _ in parts)
    if lacking > 0:
        raise Disagreement(f"{lacking:,} of {size:,} elements are in no shard")
    total = np.zeros(shape, parts[0][1].dtype)
    filled = np.zeros(shape, np.bool_)
    owner = np.zeros(shape, np.int32)  # rank + 1; zeros take no memory until they are written
    for record, array in parts:
        shard, rank = record.shard, record.rank
        if shard is None or shard.global_shape != shape:
            raise Disagreement(f"rank {rank} has no shard information, or another global shape")
        array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)  # one of a stack
        at = tuple(
            slice(start, start + length)
            for start, length in zip(shard.offsets, array.shape, strict=False)
        )
        if not len(shape) == array.ndim == len(shard.offsets) or total[at].shape != array.shape:
            raise Disagreement(f"the shard of rank {rank} lies outside {list(shape)}")
        before = filled[at]
        if before.any() and total[at][before].tobytes() != array[before].tobytes():
            other = int(owner[at][before].flat[0]) - 1
            raise Disagreement(f"the replicas of ranks {other} and {rank} differ")
        total[at] = array
        filled[at] = True
        owner[at] = rank + 1
    if not filled.all():
        lacking = int(filled.size - np.count_nonzero(filled))
        raise Disagreement(f"{lacking:,} of {filled.size:,} elements are in no shard")
    return total
