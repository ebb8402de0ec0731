"""Find the records of several ranks that belong to one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.core.record import Kind
from tensortap.table.numbering import codes, first_of
from tensortap.table.shard_keys import LAYOUT, PARTIAL, SHARD

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.table.sources import Integers
    from tensortap.table.table import Table

    Booleans = NDArray[np.bool_]

_BATCHED = (Kind.ACTIVATION.value, Kind.GRADIENT.value)
_FREE = (Kind.VALUE.value, Kind.LOCAL.value)  # nobody knows what such values of ranks are


class Places(NamedTuple):
    """The whole that each row is a part of; rows with the same batch and place are replicas."""

    batch: Integers
    place: Integers
    must_agree: Booleans  # replicas that are merged only if they are equal
    apart: Booleans  # rows that are never merged


def places_of(parts: Table, rows: Integers) -> Places:
    """Return what rows are parts of, by their shards and tags."""
    keys = parts.shard_keys()
    flags = keys.flags[rows]
    is_shard, has_layout, partial = ((flags & flag) > 0 for flag in (SHARD, LAYOUT, PARTIAL))
    batched, free = _has_kind(parts, rows, _BATCHED), _has_kind(parts, rows, _FREE)
    # without a layout, every rank has its own part of the batch
    of_batch = np.where(has_layout, -1 - keys.batch[rows], parts.rank[rows])
    return Places(
        batch=np.where(batched, of_batch, 0),
        place=np.where(is_shard, keys.place[rows], -1),
        must_agree=~is_shard & (has_layout | ~batched),
        apart=partial | (free & ~is_shard),
    )


def same_tensor(parts: Table, rows: Integers) -> Integers:
    """Return the same number for rows that are parts or replicas of one tensor.

    The same call of a name may have been recorded twice on a rank: those are two tensors.
    """
    columns: list[NDArray[Any]] = [parts.kind, parts.name, parts.step, parts.dtype]
    if parts.is_positive("call"):  # it is not copied if every name was called once
        columns.append(parts.call)
    tensor = codes(*(column[rows] for column in columns))
    of_rank = codes(tensor, parts.rank[rows])
    sizes = np.bincount(of_rank)
    if (sizes < 2).all():
        return tensor
    repeated = np.flatnonzero(sizes[of_rank] > 1)
    order = repeated[np.lexsort((parts.seq[rows[repeated]], of_rank[repeated]))]
    starts = np.flatnonzero(np.diff(of_rank[order], prepend=-1))
    repeat = np.zeros(len(rows), np.int64)
    lengths = np.diff(np.append(starts, len(order)))
    repeat[order] = np.arange(len(order)) - np.repeat(starts, lengths)
    return codes(tensor, repeat)


def unequal_groups(parts: Table, rows: Integers, groups: Integers) -> Booleans:
    """Return which groups have rows whose statistics differ."""
    content = parts.contents()[rows]
    differs = content != content[first_of(groups)[groups]]
    return np.bincount(groups[differs], minlength=int(groups.max(initial=-1)) + 1) > 0


def _has_kind(parts: Table, rows: Integers, kinds: tuple[str, ...]) -> Booleans:
    return np.array([kind in kinds for kind in parts.kinds], np.bool_)[parts.kind[rows]]
