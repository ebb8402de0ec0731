"""Whole tensors: the parts that ranks recorded, merged when they are read.

Records of one kind, name, step, call and dtype belong together, whatever rank they come from:

- Shards (their place in the whole is known) are merged; replicas of a shard count once.
- Weights, their gradients and optimizer state without a place are replicas, as under DDP: they
  count once if their statistics are equal.
- Activations and gradients without a place are parts of the global batch, and merged.
- What cannot be merged stays as it is, one row per rank: partial sums, which are no values yet,
  replicas that differ, outputs of tensor-parallel models whose layout is not known (unless they
  are equal), caught values and local variables without a place.

Counts, exponents and extremes of the whole are exact, moments are merged as in `stats.merge`. A
merged row has the name, order and rank of the part with the lowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.runs.arrow import lists, numbers, row_indices
from tensortap.runs.rows import STATISTICS
from tensortap.stats.merge import merge_column, merged_from
from tensortap.table.logframe_schema import KINDS
from tensortap.table.replicas import (
    codes,
    first_of,
    places_of,
    same_tensor,
    stable_order,
    unequal_groups,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from tensortap.table.sources import Integers, RowBlock
    from tensortap.table.table import Table

    Booleans = NDArray[np.bool_]

_BINS = ("first_bin", "bins")
_AWAITED_STEPS = 3  # of so many recorded steps, a growing table waits for ranks that are behind


class WholeSource:
    """The rows of a table with the parts of each tensor merged.

    Rows are final once they were reported. So a table that grows holds back the newest steps until
    all ranks have reached them, or nothing new has come; rows that come even later make the source
    `outdated`.
    """

    bounded = clipped = False

    def __init__(self, parts: Table) -> None:
        self._parts = parts
        self._waits = False  # the first time, all rows are reported at once

    def open(self) -> WholeSource:
        """Start over with the rows that there are now."""
        self.statistics = self._parts.own_statistics
        self.blocks: Sequence[RowBlock] = []
        self.outdated = False
        self._generation = self._parts.generation
        self._read = 0
        self._reported_step = -(1 << 62)
        self._waiting = np.empty(0, np.int64)
        self._last_steps: dict[int, int] = {}  # of ranks
        return self

    def refresh(self) -> None:
        """Report new rows of the table of parts."""
        parts = self._parts
        new = np.arange(self._read, len(parts))
        if parts.generation == self._generation:
            self._note_last_steps(new)
        late = self._is_tensor(new) & (parts.step[new] <= self._reported_step)
        if parts.generation != self._generation or (late.any() and len(self._last_steps) > 1):
            self.outdated = True
            return
        self._read = len(parts)
        rows = np.concatenate([self._waiting, new])
        ready = self._ready(rows) if self._waits and len(new) else rows >= 0
        self._waits = True
        self._waiting, rows = rows[~ready], rows[ready]
        if len(rows):
            tensors = rows[self._is_tensor(rows)]
            if len(tensors):
                self._reported_step = max(self._reported_step, int(parts.step[tensors].max()))
            self.blocks = [*self.blocks, WholeBlock(parts, *self._grouped(rows))]

    def _note_last_steps(self, rows: Integers) -> None:
        ranks, of_row = np.unique(self._parts.rank[rows], return_inverse=True)
        last = np.full(len(ranks), np.iinfo(np.int64).min)
        np.maximum.at(last, of_row, self._parts.step[rows])
        for rank, step in zip(ranks.tolist(), last.tolist(), strict=True):
            self._last_steps[rank] = max(step, self._last_steps.get(rank, step))

    def _ready(self, rows: Integers) -> Booleans:
        """Return which rows are of steps that every rank has passed, or that are old."""
        step = self._parts.step
        if len(self._last_steps) < 2:
            return rows >= 0
        passed = min(self._last_steps.values())
        passed = max(passed, int(np.unique(step[rows])[-_AWAITED_STEPS:][0]))
        return np.asarray((step[rows] < passed) | ~self._is_tensor(rows))

    def _is_tensor(self, rows: Integers) -> Booleans:
        codes = [i for i, kind in enumerate(self._parts.kinds) if kind in KINDS]
        return np.isin(self._parts.kind[rows], codes)

    def _grouped(self, rows: Integers) -> tuple[Integers, Integers]:
        """Return the rows to merge, group by group, and how many each group has."""
        parts = self._parts
        if len(np.unique(parts.rank[rows])) < 2:
            return rows, np.ones(len(rows), np.int64)
        rows = rows[stable_order(parts.rank[rows])]
        parts.prefetch(merged_from("rm2"))  # what figures show first
        tensors = np.flatnonzero(self._is_tensor(rows) & ~np.isnan(parts.column("count")[rows]))
        groups = same_tensor(parts, rows[tensors])
        is_shared = np.bincount(groups)[groups] > 1
        tensors, groups = tensors[is_shared], groups[is_shared]
        first, kept = np.arange(len(rows)), np.ones(len(rows), np.bool_)
        is_split, kept[tensors] = _mergeable(parts, rows[tensors], groups)
        # a group is merged into its first row
        first[tensors] = np.where(is_split, tensors, tensors[first_of(groups)[groups]])
        leader = rows[first[kept]]
        order = stable_order(leader)
        starts = np.flatnonzero(np.diff(leader[order], prepend=-1))
        return rows[kept][order], np.diff(np.append(starts, len(order)))


class WholeBlock:
    """Rows of a table that were reported together, as groups: `rows` lists their members."""

    def __init__(self, parts: Table, rows: Integers, lengths: Integers) -> None:
        self._parts = parts
        self._rows = rows
        self._lengths = lengths
        self._starts = np.cumsum(lengths) - lengths
        self._several = np.flatnonzero(lengths > 1)  # the groups that are merged
        self._place = np.full(len(lengths), -1)  # of a group among those
        self._place[self._several] = np.arange(len(self._several))
        self._members = rows[np.repeat(lengths > 1, lengths)]
        sizes = lengths[self._several]
        self._member_starts = np.cumsum(sizes) - sizes
        self._columns: dict[str, Any] = {}
        # adjacent rows are read faster than chosen ones
        self._is_plain = len(rows) == len(lengths) and bool((np.diff(rows) == 1).all())

    def __len__(self) -> int:
        return len(self._lengths)

    def read(self, columns: list[str], start: int) -> pa.Table:
        """Return columns of all rows from `start` on."""
        if not self._is_plain:
            return self.take(np.arange(start, len(self)), columns)
        import pyarrow as pa

        parts = self._parts.read(columns, int(self._rows[0]) + start)
        return pa.concat_tables(parts).slice(0, len(self) - start)

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        """Return columns of the given rows."""
        table = self._parts.take(self._rows[self._starts[rows]], columns)
        merged = np.flatnonzero(self._place[rows] >= 0)
        if not len(merged):
            return table
        own = np.arange(len(rows))
        own[merged] = len(rows) + self._place[rows[merged]]
        for name in columns:
            if name in STATISTICS or name in _BINS or name == "shape":
                column = _appended(table.column(name), self._merged(name))
                table = table.set_column(
                    table.column_names.index(name), table.field(name), column.take(row_indices(own))
                )
        return table

    def _merged(self, name: str) -> Any:
        """Return a column of the groups that are merged."""
        if name not in self._columns:
            starts, parts = self._member_starts, self._parts
            if name in STATISTICS:
                needed = merged_from(name)
                parts.prefetch(needed)
                given = {each: parts.column(each)[self._members] for each in needed}
                self._columns[name] = merge_column(name, given, starts)
            elif name in _BINS:
                bins = parts.take(self._members, list(_BINS))
                self._columns |= zip(_BINS, _merged_bins(bins, starts), strict=True)
            else:
                given = parts.take(self._members[starts], ["shape", "shard_shape"])
                import pyarrow.compute as pc

                self._columns["shape"] = pc.coalesce(
                    given.column("shard_shape"), given.column("shape")
                )
        return self._columns[name]


def _appended(column: pa.ChunkedArray, more: Any) -> pa.ChunkedArray:
    import pyarrow as pa

    if isinstance(more, np.ndarray):
        more = pa.array(more.astype(column.type.to_pandas_dtype()), column.type)
    chunks = more.chunks if isinstance(more, pa.ChunkedArray) else [more]
    return pa.chunked_array([*column.chunks, *(chunk.cast(column.type) for chunk in chunks)])


def _merged_bins(bins: pa.Table, starts: Integers) -> tuple[Integers, pa.Array]:
    """Return the first bin and the counts of each group of rows."""
    import pyarrow as pa

    lengths, counts = lists(bins.column("bins"))
    first = np.nan_to_num(numbers(bins.column("first_bin"))).astype(np.int64)
    ends = np.cumsum(lengths)
    exponents = np.arange(len(counts)) - np.repeat(ends - lengths - first, lengths)
    group_of_row = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(first))))
    group = np.repeat(group_of_row, lengths)
    low = np.full(len(starts), np.iinfo(np.int64).max)
    high = np.full(len(starts), np.iinfo(np.int64).min)
    np.minimum.at(low, group, exponents)
    np.maximum.at(high, group, exponents)
    sizes = np.where(low <= high, high - low + 1, 0)
    low = np.where(sizes > 0, low, 0)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    dense = np.zeros(offsets[-1], np.int64)
    np.add.at(dense, offsets[group] + exponents - low[group], counts)
    return low, pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(dense))


def _mergeable(parts: Table, rows: Integers, groups: Integers) -> tuple[Booleans, Booleans]:
    """Return which rows are of groups that cannot be merged, and which rows to keep.

    `rows` are by rank. Of replicas, the first is kept.
    """
    places = places_of(parts, rows)
    within = codes(groups, places.batch)
    is_split = np.zeros(int(groups.max(initial=-1)) + 1, np.bool_)
    is_split[groups[places.apart]] = True
    checked = np.flatnonzero(places.must_agree)
    if len(checked):
        unequal = unequal_groups(parts, rows, within)
        is_split[groups[checked[unequal[within[checked]]]]] = True
    split = is_split[groups]
    first = np.zeros(len(rows), np.bool_)
    first[first_of(codes(within, places.place))] = True
    return split, first | split
