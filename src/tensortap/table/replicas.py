"""Which records of several ranks belong to one tensor, and replicas that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.record import Kind
from tensortap.runs.arrow import coded, numbers, scalar
from tensortap.runs.rows import STATISTICS

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from tensortap.table.sources import Integers
    from tensortap.table.table import Table

    Booleans = NDArray[np.bool_]

_BATCHED = (Kind.ACTIVATION.value, Kind.GRADIENT.value)
_FREE = (Kind.VALUE.value, Kind.LOCAL.value)  # nobody knows what such values of ranks are
_PARAMETERS = (Kind.WEIGHT.value, Kind.WEIGHT_GRADIENT.value, Kind.OPTIMISER_STATE.value)
_PLACE = ["shape", "shard_shape", "shard_offsets", "shard_placements", "tags"]


class Places(NamedTuple):
    """What rows are parts of; rows with the same batch and place are replicas."""

    batch: Integers
    place: Integers
    content: Integers  # equal where all statistics are
    must_agree: Booleans  # replicas that are merged only if they are equal
    apart: Booleans  # rows that are never merged


def places_of(parts: Table, rows: Integers) -> Places:
    """Return what rows are parts of, by their shards and tags."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts.prefetch(STATISTICS)
    batched, free = _has_kind(parts, rows, _BATCHED), _has_kind(parts, rows, _FREE)
    cells = parts.take(rows, _PLACE)
    place = codes(*(_coded_lists(cells.column(name))[0] for name in ("shape", "shard_offsets")))
    placements, texts = _coded_lists(cells.column("shard_placements"))
    partial = np.array([" P" in f" {text}" for text in texts], np.bool_)[placements]
    is_shard = _is_valid(cells.column("shard_shape"))
    tag = {
        key: pc.map_lookup(cells.column("tags"), scalar(key, pa.string()), "first")
        for key in ("placements", "batch")
    }
    has_layout = _is_valid(tag["placements"])
    # without a layout, every rank has its own part of the batch
    batch_of_layout = -1 - coded(tag["batch"])[0].astype(np.int64)
    return Places(
        batch=np.where(batched, np.where(has_layout, batch_of_layout, parts.rank[rows]), 0),
        place=np.where(is_shard, place, -1),
        content=codes(*(parts.column(name)[rows].view(np.int64) for name in STATISTICS)),
        must_agree=~is_shard & (has_layout | ~batched),
        apart=partial | (free & ~is_shard),
    )


def same_tensor(parts: Table, rows: Integers) -> Integers:
    """Return the same number for rows that are parts or replicas of one tensor.

    The same call of a name may have been recorded twice on a rank: those are two tensors.
    """
    columns = (parts.kind, parts.name, parts.step, parts.call, parts.dtype)
    key = [column[rows] for column in columns]
    of_rank = codes(*key, parts.rank[rows])
    order = np.lexsort((parts.seq[rows], of_rank))
    starts = np.flatnonzero(np.diff(of_rank[order], prepend=-1))
    repeat = np.empty(len(rows), np.int64)
    repeat[order] = np.arange(len(rows)) - np.repeat(starts, np.diff(np.append(starts, len(rows))))
    return codes(*key, repeat)


class UnequalReplica(NamedTuple):
    """Ranks whose replica of a parameter differs from that of most ranks."""

    name: str
    kind: str
    first_step: int
    last_step: int
    ranks: list[int]
    replicas: int  # of how many ranks

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        who = f"ranks {ranks} have" if len(self.ranks) > 1 else f"rank {ranks} has"
        steps = f"at step {self.first_step:,}"
        if self.last_step > self.first_step:
            steps = f"from step {self.first_step:,} to {self.last_step:,}"
        others = self.replicas - len(self.ranks)
        return f"{who} another {self.name} ({self.kind}) than the other {others}, {steps}"


def unequal_replicas(parts: Table) -> list[UnequalReplica]:
    """Return the parameters whose replicas differ, by the first step; ranks are outvoted.

    If there are as many on both sides, the side of the lowest rank is taken to be right.
    """
    rows = np.flatnonzero(_has_kind(parts, np.arange(len(parts)), _PARAMETERS))
    rows = rows[~np.isnan(parts.column("count")[rows])]
    rows = rows[np.argsort(parts.rank[rows], kind="stable")]
    if not len(rows):
        return []
    places = places_of(parts, rows)
    replicas = codes(same_tensor(parts, rows), places.place)
    pairs, of_pair, votes = np.unique(
        np.stack([replicas, places.content]), axis=1, return_inverse=True, return_counts=True
    )
    of_pair = of_pair.reshape(-1)
    ranks_of = np.bincount(replicas)
    order = np.argsort(replicas, kind="stable")
    ends = np.cumsum(ranks_of)
    found: dict[Any, list[int]] = {}
    for replica in np.flatnonzero(np.bincount(pairs[0]) > 1).tolist():
        members = order[ends[replica] - ranks_of[replica] : ends[replica]]
        if places.apart[members].any():
            continue
        right = max(of_pair[members].tolist(), key=lambda pair: votes[pair])
        for row in rows[members[of_pair[members] != right]].tolist():
            key = parts.name[row], parts.kind[row], int(parts.step[row]), int(ranks_of[replica])
            found.setdefault(key, []).append(int(parts.rank[row]))
    return _joined(parts, found)


def _joined(parts: Table, found: dict[Any, list[int]]) -> list[UnequalReplica]:
    """Return one entry per name, kind and ranks, over all steps."""
    joined: dict[Any, UnequalReplica] = {}
    for (name, kind, step, replicas), ranks in sorted(found.items(), key=lambda item: item[0][2]):
        outvoted = sorted(set(ranks))
        key = name, kind, tuple(outvoted)
        if key in joined:
            replicas = max(replicas, joined[key].replicas)
            joined[key] = joined[key]._replace(last_step=step, replicas=replicas)
        else:
            title = parts.names[name], parts.kinds[kind]
            joined[key] = UnequalReplica(*title, step, step, outvoted, replicas)
    return list(joined.values())


def _has_kind(parts: Table, rows: Integers, kinds: tuple[str, ...]) -> Booleans:
    return np.isin(parts.kind[rows], [i for i, kind in enumerate(parts.kinds) if kind in kinds])


def codes(*columns: Any) -> Integers:
    """Return numbers from 0 on that are equal where all columns are.

    >>> codes(np.array([7, 5, 7]), np.array([0, 0, 0]))
    array([1, 0, 1])
    """
    order = np.lexsort(columns[::-1])
    changed = np.zeros(len(order), np.int64)
    for column in columns:
        ordered = column[order]
        changed[1:] |= ordered[1:] != ordered[:-1]
    codes = np.empty(len(order), np.int64)
    codes[order] = np.cumsum(changed)
    return codes


def _coded_lists(column: pa.ChunkedArray) -> tuple[Integers, list[str]]:
    """Return codes of a column of lists, and the lists as texts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    codes, texts = coded(
        pc.binary_join(column.cast(pa.list_(pa.string())), scalar(" ", pa.string()))
    )
    return codes.astype(np.int64), texts


def _is_valid(column: pa.ChunkedArray) -> Booleans:
    import pyarrow.compute as pc

    return numbers(pc.cast(pc.is_valid(column), "int8")) > 0
