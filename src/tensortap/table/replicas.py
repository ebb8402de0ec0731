"""Find the records of several ranks that belong to one tensor, and replicas that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.record import Kind
from tensortap.table.numbering import codes, first_of
from tensortap.table.shard_keys import LAYOUT, PARTIAL, SHARD

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.table.sources import Integers
    from tensortap.table.table import Table

    Booleans = NDArray[np.bool_]

_BATCHED = (Kind.ACTIVATION.value, Kind.GRADIENT.value)
_FREE = (Kind.VALUE.value, Kind.LOCAL.value)  # nobody knows what such values of ranks are
_PARAMETERS = (Kind.WEIGHT.value, Kind.WEIGHT_GRADIENT.value, Kind.OPTIMISER_STATE.value)


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


def tensor_columns(parts: Table) -> list[NDArray[Any]]:
    """Return the columns that are equal for parts and replicas of a tensor."""
    columns: list[NDArray[Any]] = [parts.kind, parts.name, parts.step, parts.dtype]
    if parts.is_positive("call"):  # it is not copied if every name was called once
        columns.append(parts.call)
    return columns


def same_tensor(parts: Table, rows: Integers) -> Integers:
    """Return the same number for rows that are parts or replicas of one tensor.

    The same call of a name may have been recorded twice on a rank: those are two tensors.
    """
    tensor = codes(*(column[rows] for column in tensor_columns(parts)))
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


class UnequalReplica(NamedTuple):
    """Ranks whose replica of a parameter differs from that of most ranks, or from each other."""

    name: str
    kind: str
    first_step: int
    last_step: int
    ranks: list[int]
    replicas: int  # of how many ranks; as many as `ranks` if no side has the majority

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        steps = f"at step {self.first_step:,}"
        if self.last_step > self.first_step:
            steps = f"from step {self.first_step:,} to {self.last_step:,}"
        others = self.replicas - len(self.ranks)
        if not others:
            return f"ranks {ranks} differ in {self.name} ({self.kind}), {steps}"
        who = f"ranks {ranks} have" if len(self.ranks) > 1 else f"rank {ranks} has"
        return f"{who} another {self.name} ({self.kind}) than the other {others}, {steps}"


def unequal_replicas(parts: Table) -> list[UnequalReplica]:
    """Return the parameters whose replicas differ, by the first step.

    Ranks are outvoted by more than half of the replicas; without a majority, all are named.
    """
    rows = np.flatnonzero(_has_kind(parts, np.arange(len(parts)), _PARAMETERS))
    rows = rows[~np.isnan(parts.column("count")[rows])]
    if not len(rows):
        return []
    places = places_of(parts, rows)
    replicas = codes(same_tensor(parts, rows), places.place)
    unequal = unequal_groups(parts, rows, replicas)
    unequal[replicas[places.apart]] = False
    chosen = unequal[replicas]
    rows, replicas = rows[chosen], codes(replicas[chosen])
    content = codes(replicas, parts.contents()[rows].view(np.int64))
    size = np.bincount(replicas)[replicas]
    is_right = 2 * np.bincount(content)[content] > size
    return _joined(parts, rows[~is_right], replicas[~is_right], size[~is_right])


def _joined(
    parts: Table, rows: Integers, replicas: Integers, sizes: Integers
) -> list[UnequalReplica]:
    """Return one entry per name, kind and ranks, over all steps."""
    order = np.lexsort((parts.rank[rows], replicas, parts.step[rows]))
    edges = np.flatnonzero(np.diff(replicas[order])) + 1
    joined: dict[Any, UnequalReplica] = {}
    for members in np.split(order, edges) if len(order) else ():
        row, size = rows[members[0]], int(sizes[members[0]])
        step, ranks = int(parts.step[row]), parts.rank[rows[members]].tolist()
        key = parts.name[row], parts.kind[row], size == len(ranks), tuple(ranks)
        if key in joined:
            size = max(size, joined[key].replicas)
            joined[key] = joined[key]._replace(last_step=step, replicas=size)
        else:
            title = parts.names[parts.name[row]], parts.kinds[parts.kind[row]]
            joined[key] = UnequalReplica(*title, step, step, ranks, size)
    return list(joined.values())


def _has_kind(parts: Table, rows: Integers, kinds: tuple[str, ...]) -> Booleans:
    return np.array([kind in kinds for kind in parts.kinds], np.bool_)[parts.kind[rows]]
