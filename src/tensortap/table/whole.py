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

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.runs.arrow import dictionary_array, lists, number_array, numbers, row_indices
from tensortap.runs.rows import STATISTICS
from tensortap.runs.windows import WindowBlock
from tensortap.stats.merge import merge_column, merged_from
from tensortap.table.columns import NONFINITE, NONFINITE_COUNTS
from tensortap.table.kinds import KINDS
from tensortap.table.numbering import codes, first_of
from tensortap.table.shard_keys import places_of, same_tensor, unequal_groups

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from tensortap.runs.windows import Window
    from tensortap.table.sources import Integers, RowBlock, RowSource, RunSource
    from tensortap.table.table import Table

    Booleans = NDArray[np.bool_]
    Floats = NDArray[np.float64]

_BINS = ("first_bin", "bins")
_TEXTS = {"name": "names", "kind": "kinds", "dtype": "dtypes"}
_INTEGERS = ("step", "rank", "call", "seq")
_HELD = (*_TEXTS, *_INTEGERS, "number", *STATISTICS)
_AWAITED_STEPS = 3  # of so many recorded steps, a growing table waits for ranks that are behind


class WholeSource:
    """The rows of a table with the parts of each tensor merged.

    Rows are final once they were reported. So a table that grows holds back the newest steps until
    all ranks have reached them, or nothing new has come; rows that come even later make the source
    `outdated`.
    """

    bounded = clipped = is_large = False
    names: Sequence[str] = ()

    def __init__(self, parts: Table) -> None:
        self._parts = parts
        self._waits = False  # the first time, all rows are reported at once

    def open(self) -> WholeSource:
        """Start over with the rows that there are now."""
        self.statistics = [n for n in self._parts.statistics() if n != NONFINITE]
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
            self._note_last_steps(self._read)
        if parts.generation != self._generation or self._is_late(new):
            self.outdated = True
            return
        self._read = len(parts)
        rows = np.concatenate([self._waiting, new]) if len(self._waiting) else new
        self._waiting = rows[:0]
        if self._waits and len(new):
            ready = self._ready(rows)
            self._waiting, rows = rows[~ready], rows[ready]
        self._waits = True
        if len(rows):
            last = parts.step[rows].max(initial=self._reported_step, where=self._is_tensor(rows))
            self._reported_step = int(last)
            self.blocks = [*self.blocks, WholeBlock(parts, *self._grouped(rows))]

    def _is_late(self, rows: Integers) -> bool:
        """Return whether a row is of a step whose tensors were already merged."""
        if len(self._last_steps) < 2 or not self.blocks:
            return False
        late = self._is_tensor(rows) & (self._parts.step[rows] <= self._reported_step)
        return bool(late.any())

    def _note_last_steps(self, start: int) -> None:
        rank, step = self._parts.rank[start:], self._parts.step[start:]
        # mostly, ranks come one by one
        starts = np.append(0, np.flatnonzero(rank[1:] != rank[:-1]) + 1)[: len(rank)]
        last = np.maximum.reduceat(step, starts) if len(starts) else starts
        number = codes(rank[starts])  # many if rows are sorted by step
        newest = np.full(int(number.max(initial=-1)) + 1, np.iinfo(np.int64).min)
        np.maximum.at(newest, number, last)
        ranks = rank[starts[first_of(number)]]
        for each, step_of in zip(ranks.tolist(), newest.tolist(), strict=True):
            self._last_steps[each] = max(step_of, self._last_steps.get(each, step_of))

    def _ready(self, rows: Integers) -> Booleans:
        """Return which rows are of steps that every rank has passed, or that are old."""
        step = self._parts.step
        if len(self._last_steps) < 2:
            return rows >= 0
        passed = min(self._last_steps.values())
        passed = max(passed, int(np.unique(step[rows])[-_AWAITED_STEPS:][0]))
        return np.asarray((step[rows] < passed) | ~self._is_tensor(rows))

    def _is_tensor(self, rows: Integers) -> Booleans:
        of_kind = np.array([kind in KINDS for kind in self._parts.kinds], np.bool_)
        return np.asarray(of_kind[self._parts.kind[rows]])

    def _grouped(self, rows: Integers) -> tuple[Integers, Integers]:
        """Return the rows to merge, group by group, and how many each group has."""
        parts = self._parts
        rank = parts.rank[rows]
        if not len(rows) or (rank == rank[0]).all():
            return rows, np.ones(len(rows), np.int64)
        if (rank[1:] < rank[:-1]).any():
            rows = rows[np.argsort(rank, kind="stable")]
        parts.prefetch(merged_from("rm2"))  # what figures show first
        is_tensor = self._is_tensor(rows) & ~np.isnan(parts.column("count")[rows])
        tensors = np.flatnonzero(is_tensor)
        groups = same_tensor(parts, rows[tensors])
        sizes = np.bincount(groups)
        if (sizes < 2).any():
            is_shared = sizes[groups] > 1
            tensors, groups = tensors[is_shared], groups[is_shared]
        first, kept = np.arange(len(rows)), np.ones(len(rows), np.bool_)
        is_split, kept[tensors] = _mergeable(parts, rows[tensors], groups)
        # a group is merged into its first row
        first[tensors] = np.where(is_split, tensors, tensors[first_of(groups)[groups]])
        leader = rows[first[kept]]
        order = np.argsort(leader, kind="stable")  # ranks are sorted already
        starts = np.flatnonzero(np.diff(leader[order], prepend=-1))
        return rows[kept][order], np.diff(np.append(starts, len(order)))


class RolledSource:
    """Whole tensors of a compacted run: roll-ups of its windows, merged with loose rows.

    Of steps to which rows came late, all rows are merged again.
    """

    bounded = clipped = is_large = False

    def __init__(
        self, source: RunSource, new_table: Callable[[Callable[[], RowSource]], Table]
    ) -> None:
        self.names: Sequence[str] = source.names
        self.statistics = source.statistics
        self.outdated = False
        self._windows = source.windows
        self._loose = new_table(lambda: source.loose(np.empty(0, np.int64)))
        self._late = self._late_steps()
        if len(self._late):
            self._loose = new_table(lambda: source.loose(self._late))
        self._whole = WholeSource(self._loose).open()
        self._rolled = [block for w in self._windows for block in self._blocks_of(w)]
        self.blocks: Sequence[RowBlock] = self._rolled

    def _late_steps(self) -> Integers:
        """Return steps of loose rows that windows have, too."""
        steps = self._loose.steps()
        inside = np.zeros(len(steps), np.bool_)
        for window in self._windows:
            inside |= window.has(steps)
        return steps[inside]

    def _blocks_of(self, window: Window) -> Iterator[RowBlock]:
        for group in window.whole.groups():
            kept = None
            if window.has(self._late).any():
                step = numbers(window.whole.read(group, ["step"]).column("step"))
                kept = np.flatnonzero(~np.isin(step, self._late))
            if kept is None or len(kept):
                yield WindowBlock(window.whole, group, kept)

    def refresh(self) -> None:
        """Report new rows that are in no window."""
        self._loose.refresh()
        self._whole.refresh()
        self.outdated = self._whole.outdated or len(self._late_steps()) > len(self._late)
        self.blocks = [*self._rolled, *self._whole.blocks]


class WholeBlock:
    """Rows of a table that were reported together, as groups: `rows` lists their members."""

    def __init__(self, parts: Table, rows: Integers, lengths: Integers) -> None:
        self._parts = parts
        self._lengths = lengths
        self._starts = np.cumsum(lengths) - lengths
        self._several = np.flatnonzero(lengths > 1)  # the groups that are merged
        self._place = np.full(len(lengths), -1)  # of a group among those
        self._place[self._several] = np.arange(len(self._several))
        self._members = rows[np.repeat(lengths > 1, lengths)]
        sizes = lengths[self._several]
        self._member_starts = np.cumsum(sizes) - sizes
        self._columns: dict[str, Floats] = {}  # statistics of the merged groups
        self.leaders = rows[self._starts]  # whose name and rank the groups have

    def __len__(self) -> int:
        return len(self._lengths)

    def read(self, columns: list[str], start: int) -> pa.Table:
        """Return columns of all rows from `start` on."""
        import pyarrow as pa

        rows = np.arange(start, len(self))
        held = [self._held(name, rows) for name in columns if name in _HELD]
        if len(held) < len(columns):
            return self.take(rows, columns)
        return pa.Table.from_arrays(held, columns)

    def _held(self, name: str, rows: Integers) -> pa.Array:
        """Return a column that the table of parts has in memory."""
        parts, leaders = self._parts, self.leaders[rows]
        if name in _TEXTS:
            return dictionary_array(getattr(parts, name)[leaders], getattr(parts, _TEXTS[name]))
        if name in _INTEGERS:
            return number_array(parts.values_at(name, leaders))
        if name == "number":
            return number_array(parts.column("value")[leaders], parts.has_number(leaders))
        values, place = parts.values_at(name, leaders), self._place[rows]
        if len(self._several):
            values = np.where(place >= 0, self._merged(name)[place], values)
        return number_array(values, ~np.isnan(parts.column("count")[leaders]))

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        """Return columns of the given rows."""
        table = self._parts.take(self.leaders[rows], columns)
        merged = np.flatnonzero(self._place[rows] >= 0)
        if not len(merged):
            return table
        own, places = np.arange(len(rows)), self._place[rows[merged]]
        own[merged] = len(rows) + np.arange(len(merged))
        bins = self._merged_bins(places) if set(_BINS) & set(columns) else {}
        for name in columns:
            if name in STATISTICS:
                more = number_array(self._merged(name)[places])
            elif name in _BINS:
                more = bins[name]
            elif name == "shape":
                more = self._merged_shapes(places)
            else:
                continue
            column = _appended(table.column(name), more).take(row_indices(own))
            table = table.set_column(table.column_names.index(name), table.field(name), column)
        return table

    def _merged(self, name: str) -> Floats:
        """Return a statistic of the groups that are merged."""
        if name not in self._columns:
            needed, parts = merged_from(name), self._parts
            parts.prefetch(needed)
            # mostly, no value is NaN or Inf
            none = {n for n in NONFINITE_COUNTS if n in needed and not (parts.column(n) > 0).any()}
            given = {each: parts.column(each)[self._members] for each in needed if each not in none}
            given |= dict.fromkeys(none, np.broadcast_to(0.0, len(self._members)))
            self._columns[name] = merge_column(name, given, self._member_starts)
        return self._columns[name]

    def _merged_bins(self, groups: Integers) -> dict[str, pa.Array]:
        """Return the exponent counts of some groups: those of all would fill the memory."""
        lengths = self._lengths[self._several[groups]]
        starts = np.cumsum(lengths) - lengths
        members = np.repeat(self._member_starts[groups] - starts, lengths)
        members += np.arange(len(members))
        bins = self._parts.take(self._members[members], list(_BINS))
        return dict(zip(_BINS, _merged_bins(bins, starts), strict=True))

    def _merged_shapes(self, groups: Integers) -> pa.ChunkedArray:
        import pyarrow.compute as pc

        first = self._members[self._member_starts[groups]]
        given = self._parts.take(first, ["shape", "shard_shape"])
        return pc.coalesce(given.column("shard_shape"), given.column("shape"))


def _appended(column: pa.ChunkedArray, more: Any) -> pa.ChunkedArray:
    import pyarrow as pa

    chunks = more.chunks if isinstance(more, pa.ChunkedArray) else [more]
    return pa.chunked_array([*column.chunks, *(chunk.cast(column.type) for chunk in chunks)])


def _merged_bins(bins: pa.Table, starts: Integers) -> tuple[pa.Array, pa.Array]:
    """Return the first bin and the counts of each group of rows."""
    import pyarrow as pa

    lengths, counts = lists(bins.column("bins"))
    first = np.nan_to_num(numbers(bins.column("first_bin"))).astype(np.int64)
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(first))))
    largest = np.iinfo(np.int64).max
    low = np.minimum.reduceat(np.where(lengths > 0, first, largest), starts)
    end = np.maximum.reduceat(np.where(lengths > 0, first + lengths, -largest), starts)
    sizes = np.where(low < end, end - low, 0)
    low = np.where(sizes > 0, low, 0)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    at = np.arange(len(counts))
    at += np.repeat((offsets[:-1] - low)[group] + first - np.cumsum(lengths) + lengths, lengths)
    dense = np.zeros(offsets[-1], np.int64)
    np.add.at(dense, at, counts)
    ends = number_array(offsets.astype(np.int32))
    return number_array(low), pa.ListArray.from_arrays(ends, number_array(dense))


def _mergeable(parts: Table, rows: Integers, groups: Integers) -> tuple[Booleans, Booleans]:
    """Return which rows are of groups that cannot be merged, and which rows to keep.

    `rows` are by rank. Of replicas, the first is kept.
    """
    places = places_of(parts, rows)
    is_split = np.zeros(int(groups.max(initial=-1)) + 1, np.bool_)
    if places.apart.any():
        is_split[groups[places.apart]] = True
    checked = np.flatnonzero(places.must_agree)
    if len(checked):
        within = codes(groups, places.batch)
        unequal = unequal_groups(parts, rows, within)
        is_split[groups[checked[unequal[within[checked]]]]] = True
    split, first = is_split[groups], np.ones(len(rows), np.bool_)
    # without a layout, every rank has its own batch, whose number is the rank: no replicas
    shared = np.flatnonzero(places.batch <= 0)
    same = codes(groups[shared], places.batch[shared], places.place[shared])
    first[shared] = False
    first[shared[first_of(same)]] = True
    return split, first | split
