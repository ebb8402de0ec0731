"""One query that compares the ranks of a job, over the table of a run or of a live session.

It finds replicas that differ (``replicas``), ranks whose statistics are far from those of the other
ranks (``outlier``), and ranks that are behind (``behind``). All three read columns of the table;
Python objects are made only of what is found.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from tensortap.alerts import Alert
from tensortap.alerts.alert import module_of
from tensortap.core.record import Kind, Record
from tensortap.rooms.ranks.norms import ClippedNorms
from tensortap.rooms.ranks.ranks import RankProgress, alike_groups, compared, progress
from tensortap.runs.arrow import numbers
from tensortap.table.columns import VALUE
from tensortap.table.numbering import codes, distinct, first_of, stable_order
from tensortap.table.replicas import same_tensor
from tensortap.table.shard_keys import PARTIAL, SHARD
from tensortap.table.table import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.table.sources import Integers

    Booleans = NDArray[np.bool_]
    Floats = NDArray[np.float64]

REPLICAS, OUTLIER, BEHIND = RULES = ("replicas", "outlier", "behind")
"""The rules of findings."""

COMPARED = (
    Kind.ACTIVATION, Kind.GRADIENT, Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE,
    Kind.METRIC,
)  # fmt: skip
"""The kinds of records that are compared."""

_PARAMETERS = (Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE)
# a program may average gradients after they were recorded, so those of ranks may differ
_REPLICATED = (Kind.WEIGHT, Kind.OPTIMISER_STATE)
_PATIENCE = 5  # recorded steps in a row in which a rank must be far
_LATE_STEPS = 10  # recorded steps by which a rank is behind
_LATE_SECONDS = 60.0  # without a record of a rank, while most ranks have come further
_WITNESSES = 15  # ranks whose times tell when most ranks reached a step
_CHUNK = 1 << 17  # rows that are compared at a time, if they have several steps; bounds memory
_NAMED = 6  # ranks that a message names
_SHARE = 0.05  # of the time of a processor that comparing a growing table may take


class RankFinding(msgspec.Struct, frozen=True):
    """A difference of one or more ranks from the others, from `step` to `last_step`.

    `rule` is one of `RULES`. `name`, `kind` and `module` are those of the first tensor; `tensors`
    counts them.
    """

    rule: str
    ranks: tuple[int, ...]
    name: str
    kind: Kind
    module: str
    step: int
    last_step: int
    tensors: int
    message: str

    def __str__(self) -> str:
        return self.message

    @property
    def alert(self) -> Alert:
        """The finding as an alert about its first rank."""
        facts = {"ranks": len(self.ranks), "tensors": self.tensors, "last_step": self.last_step}
        return Alert(
            self.rule, self.name, self.kind, self.step, self.ranks[0], self.module, self.message,
            self.module, facts=dict(facts),
        )  # fmt: skip


def rank_findings(
    table: Table, *, settled: bool = False, now_ns: int | None = None
) -> list[RankFinding]:
    """Return what distinguishes ranks from the others, by step.

    With `settled`, tensors are compared up to the last step that all ranks have passed which are
    not behind: of later ones, records may be on their way. `now_ns` is the time of a live session;
    of a run, the times of its records count.
    """
    rows = np.flatnonzero(_is_kind(table, COMPARED))
    made = progress(table, rows)
    if len(made.ranks) < 2:
        return []
    found = list(_late_findings(table, rows, made, now_ns))
    if settled:
        late = [each.ranks[0] for each in found]
        rows = rows[table.step[rows] < made.last[~np.isin(made.ranks, late)].min()]
    width = len(table.names)  # another thread may add some meanwhile
    seen = np.zeros(width * len(table.kinds), np.int64)
    groups, replicas = alike_groups(table), _Replicas(table)
    far, unequal = [], []
    for chunk in _chunks(table, rows):
        series = table.kind[chunk].astype(np.int64) * width + table.name[chunk]
        column = codes(table.step[chunk], series)
        order = _ordinals(series[first_of(column)], seen)[column]
        far.append(_far_cells(table, chunk, series, column, order, groups))
        unequal.append(replicas.unequal(chunk, series, order))
    if len(rows):
        found += _far_findings(table, *map(np.concatenate, zip(*far, strict=True)))
        found += replicas.findings(*map(np.concatenate, zip(*unequal, strict=True)))
    return sorted(found, key=lambda each: each.step)


class GrowingFindings:
    """Findings in a table that grows, as alerts; finding them again takes little time."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._norms = ClippedNorms(table)
        self._known: list[Alert] = []
        self._version: tuple[int, int] | None = None
        self._next = 0.0  # when to look again

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that apply to the table."""
        several = len(self._table.ranks()) > 1
        return (*RULES, *self._norms.rules) if several else ()

    def get(self) -> list[Alert]:
        """Return what has been found, perhaps a little while ago."""
        version = self._table.generation, self._table.version
        start = time.monotonic()
        if version != self._version and start >= self._next:
            found = rank_findings(self._table)
            self._known = [*(each.alert for each in found), *self._norms.get()]
            self._version = version
            end = time.monotonic()
            self._next = end + (end - start) / _SHARE
        return list(self._known)


# -- rows --------------------------------------------------------------------------------------


def _is_kind(table: Table, kinds: Iterable[Kind], rows: Integers | None = None) -> Booleans:
    """Return which of some rows, or of all, are of some kinds."""
    wanted = {kind.value for kind in kinds}
    is_wanted = np.array([kind in wanted for kind in table.kinds], np.bool_)
    return np.asarray(is_wanted[table.kind if rows is None else table.kind[rows]])


def _chunks(table: Table, rows: Integers) -> Iterator[Integers]:
    """Yield the rows of several steps at a time, by step."""
    step = codes(table.step[rows])
    order = stable_order(step)
    first = np.flatnonzero(np.diff(step[order], prepend=-1))  # of each step
    edges = first[np.flatnonzero(np.diff(first // _CHUNK, prepend=-1))]
    if len(rows):
        yield from np.split(rows[order], edges[1:])


def _ordinals(series: Integers, seen: Integers) -> Integers:
    """Return which recorded step of its series each column is; `seen` counts those before."""
    number = codes(series)
    order, counts = stable_order(number), np.bincount(number)
    ordinal = np.empty(len(series), np.int64)
    ordinal[order] = np.arange(len(series)) - np.repeat(np.cumsum(counts) - counts, counts)
    ordinal += seen[series]
    seen[distinct(series)] += counts
    return ordinal


def _episodes(key: Integers, order: Integers, length: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last position of `length` or more cells of a key in a row."""
    by_key = np.lexsort((order, key))
    key, order = key[by_key], order[by_key]
    starts = np.flatnonzero((np.diff(key, prepend=-1) != 0) | (np.diff(order, prepend=-2) > 1))
    ends = np.append(starts[1:], len(key))[: len(starts)]
    long = ends - starts >= length
    yield from zip(by_key[starts[long]].tolist(), by_key[ends[long] - 1].tolist(), strict=True)


# -- statistics that are far from those of other ranks -------------------------------------------


def _far_cells(
    table: Table,
    rows: Integers,
    series: Integers,
    column: Integers,
    order: Integers,
    groups: Sequence[Sequence[int]],
) -> tuple[NDArray[Any], ...]:
    """Return row, series, order and median of the tensors that are far; shards are not compared."""
    is_shard = _is_kind(table, _PARAMETERS, rows) & table.shard_keys().has(SHARD, rows)
    is_metric = _is_kind(table, [Kind.METRIC], rows)
    value, bad = table.column("rm2")[rows], table.nonfinite(rows) > 0
    if is_metric.any():
        value[is_metric] = table.column(VALUE)[rows[is_metric]]
        bad |= is_metric & table.has_number(rows) & ~np.isfinite(value)
    known = (~np.isnan(value) | bad) & ~is_shard
    rows, series, order, column = (each[known] for each in (rows, series, order, column))
    matrix = compared(table.rank[rows], column, value[known], bad[known], groups)
    at = np.zeros(matrix.far.shape, np.int64)
    at[codes(table.rank[rows]), codes(column)] = np.arange(len(rows))
    chosen = at[matrix.far]
    return rows[chosen], series[chosen], order[chosen], matrix.median[matrix.far]


def _far_findings(
    table: Table, rows: Integers, series: Integers, order: Integers, median: Floats
) -> Iterator[RankFinding]:
    """Yield one finding for each rank and time in which some of its tensors are far."""
    rank, seq = table.rank[rows].astype(np.int64), table.values_at("seq", rows)
    found = [
        _Episode(int(rank[first]), int(table.step[rows[first]]), int(seq[first]), first,
                 int(table.step[rows[last]]))
        for first, last in _episodes(codes(rank, series), order, _PATIENCE)
    ]  # fmt: skip
    for members in _overlapping(sorted(found)):
        one = members[0]
        record = _record_at(table, rows[one.first])
        is_metric = record.kind is Kind.METRIC
        number = table.column(VALUE if is_metric else "rm2")[rows[one.first]]
        is_bad = table.nonfinite(rows[[one.first]])[0] > 0 or not np.isfinite(number)
        held = f"its {'value' if is_metric else 'RMS'} is {number:.4g}"
        tensors = len({int(series[each.first]) for each in members})
        more = f"; {tensors:,} of its tensors are far" if tensors > 1 else ""
        message = (
            f"rank {one.rank} is far from the other ranks since step {one.step:,}: "
            f"{'it holds NaN or Inf' if is_bad else held}, "
            f"their median is {median[one.first]:.4g}{more}"
        )
        yield RankFinding(
            OUTLIER, (one.rank,), record.name, record.kind, module_of(record), one.step,
            max(each.last_step for each in members), tensors, message,
        )  # fmt: skip


class _Episode(NamedTuple):
    """A tensor of a rank that is far for some steps; `first` is its first cell."""

    rank: int
    step: int
    seq: int
    first: int
    last_step: int


def _overlapping(found: list[_Episode]) -> Iterator[list[_Episode]]:
    """Yield the episodes of each rank that overlap; `found` is by rank and first step."""
    members: list[_Episode] = []
    for each in found:
        if members and (
            each.rank != members[0].rank or each.step > max(m.last_step for m in members)
        ):
            yield members
            members = []
        members.append(each)
    if members:
        yield members


# -- replicas that differ --------------------------------------------------------------------------


class _Replicas:
    """Compares weights and optimizer state that several ranks have, by statistics and digests.

    Plain tensors with the same name need not be replicas: ranks may train models of their own, or
    split tensors by hand. They count as replicas if most ranks had the same one at some time, or
    its gradient. If all elements are equal, as those of biases and norms at first, this tells
    nothing before the third record: a warmup may leave them as they are in the first step.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._alike = np.zeros(len(table.names), np.bool_)  # names that most ranks had alike
        self._early: list[Integers] = []  # rows of tensors that most ranks had alike at first
        rows = np.flatnonzero(_is_kind(table, _REPLICATED))
        ends = table.take(rows[[0, -1]] if len(rows) else rows, ["digest"]).column(0)
        # with `track(digests=True)` all of them have one
        self._digests = table.digests() if ends.null_count < len(ends) else None

    def unequal(
        self, rows: Integers, series: Integers, order: Integers
    ) -> tuple[NDArray[Any], ...]:
        """Return row, series, order, cell and number of replicas of those that are outvoted."""
        table, keys = self._table, self._table.shard_keys()
        wanted = _is_kind(table, _PARAMETERS, rows) & ~keys.has(PARTIAL, rows)
        wanted &= table.column("count")[rows] > 0
        rows, series, order = rows[wanted], series[wanted], order[wanted]
        is_shard = keys.has(SHARD, rows)
        cell = codes(same_tensor(table, rows), np.where(is_shard, keys.place[rows], -1))
        size = np.bincount(cell)[cell]
        content = codes(cell, self._contents(rows, cell, size).view(np.int64))
        is_right = 2 * np.bincount(content)[content] > size
        is_alike = (size > 1) & (is_shard | is_right)
        self._alike[table.name[rows[is_alike & (is_shard | (order > 1))]]] = True
        early = np.flatnonzero(is_alike & ~is_shard & (order < 2))
        self._early.append(rows[early[first_of(codes(cell[early]))]])
        chosen = ~is_right & _is_kind(table, _REPLICATED, rows)
        return rows[chosen], series[chosen], order[chosen], cell[chosen], size[chosen]

    def _contents(self, rows: Integers, cell: Integers, size: Integers) -> NDArray[np.uint64]:
        """Return 64 bits of each row that differ if its statistics or its digest do."""
        content = self._table.contents()[rows]
        if self._digests is None:
            return content
        digest = self._digests[rows]
        has_all = np.bincount(cell, digest > 0)[cell] == size
        return content ^ np.where(has_all, digest, 0).astype(np.uint64)

    def findings(
        self, rows: Integers, series: Integers, order: Integers, cell: Integers, size: Integers
    ) -> Iterator[RankFinding]:
        """Yield one finding for tensors of the same ranks that begin to differ at the same step."""
        table = self._table
        if not len(rows):
            return
        early = np.sort(np.concatenate(self._early))
        early = early[np.isin(table.name[early], table.name[rows])]
        low, high = (numbers(c) for c in table.take(early, ["min", "max"]).columns)
        self._alike[table.name[early[low != high]]] = True
        chosen = np.flatnonzero(self._alike[table.name[rows]])
        if not len(chosen):
            return
        by = table.rank[rows], cell, series, table.step[rows]
        chosen = chosen[np.lexsort([column[chosen] for column in by])]
        rows, series, order, cell, size = (c[chosen] for c in (rows, series, order, cell, size))
        step, rank = table.step[rows], table.rank[rows]
        starts = np.flatnonzero(np.diff(codes(step, series, cell), prepend=-1))  # of each tensor
        ends = np.append(starts[1:], len(rows))
        # the same number for the same ranks
        code = codes(rank)
        random_numbers = np.random.default_rng(0).integers(1 << 62, size=int(code.max()) + 1)
        ranks = np.add.reduceat(random_numbers[code], starts)
        begun: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for first, last in _episodes(codes(ranks, series[starts]), order[starts], 1):
            began = int(step[starts[first]]), int(ranks[first])
            begun.setdefault(began, []).append((int(starts[first]), int(starts[last])))
        for found in begun.values():
            seq = table.values_at("seq", rows[[first for first, _ in found]])
            first = found[int(np.argmin(seq))][0]
            outvoted = rank[first : ends[np.searchsorted(starts, first)]].tolist()
            yield _unequal_finding(
                _record_at(table, rows[first]), outvoted, int(size[first]), int(step[first]),
                max(int(step[last]) for _, last in found),
                len({int(series[each]) for each, _ in found}),
            )  # fmt: skip


def _unequal_finding(
    record: Record, ranks: list[int], replicas: int, step: int, last_step: int, tensors: int
) -> RankFinding:
    what = f"{record.name} ({record.kind.value})"
    if len(ranks) < replicas:
        has = "has" if len(ranks) == 1 else "have"
        others = f"the other {replicas - len(ranks):,}"
        message = f"{_words(ranks)} {has} another {what} than {others} since step {step:,}"
    else:
        message = f"{what} differs between {_words(ranks)} since step {step:,}, without a majority"
    message += f"; {tensors:,} tensors differ" if tensors > 1 else ""
    return RankFinding(
        REPLICAS, tuple(ranks), record.name, record.kind, module_of(record), step, last_step,
        tensors, message,
    )  # fmt: skip


def _words(ranks: Sequence[int]) -> str:
    """Return ranks as text.

    >>> _words([3]), _words([0, 2]), _words(range(9))
    ('rank 3', 'ranks 0, 2', 'ranks 0, 1, 2, 3, 4, 5 and 3 more')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED]))}{more}"


# -- ranks that are behind -----------------------------------------------------------------------


def ranks_behind(table: Table, now_ns: int | None = None) -> list[RankFinding]:
    """Return the ranks that most ranks have overtaken, or that have stopped recording."""
    rows = np.flatnonzero(_is_kind(table, COMPARED))
    return list(_late_findings(table, rows, progress(table, rows), now_ns))


def _late_findings(
    table: Table, rows: Integers, made: RankProgress, now_ns: int | None
) -> Iterator[RankFinding]:
    half = len(made.ranks) // 2
    newest = np.sort(made.last)[::-1][half : half + 1]  # more than half of the ranks were so far
    late = made.last < newest
    if not late.any():
        return
    rank, step = table.rank[rows], table.step[rows]
    # to read times of all ranks takes long: a few of those that are not late stand for most
    others = made.ranks[~late][:_WITNESSES]
    chosen = rows[np.isin(rank, [*others, *made.ranks[late]])]
    of_last = chosen[
        table.step[chosen] == made.last[np.searchsorted(made.ranks, table.rank[chosen])]
    ]
    ends = len(of_last) - 1 - first_of(codes(table.rank[of_last])[::-1])
    known = distinct(table.rank[of_last]).tolist()
    times = dict(zip(known, _times(table, of_last[ends]).tolist(), strict=True))
    now = int(np.median([times[each] for each in others.tolist()])) if now_ns is None else now_ns
    steps = distinct(step)
    steps = steps[steps <= newest]
    for number, last in zip(made.ranks[late].tolist(), made.last[late].tolist(), strict=True):
        missed = steps[np.searchsorted(steps, last, side="right") :]
        seconds = (now - times[number]) / 1e9
        is_slow = False
        if len(missed) >= _LATE_STEPS:
            # records may arrive late: what counts is how far most ranks were at that time
            of_step = rows[(step == missed[_LATE_STEPS - 1]) & np.isin(rank, others)]
            reached = _times(table, of_step[first_of(codes(table.rank[of_step]))])
            is_slow = 2 * int((reached <= times[number]).sum()) > len(others)
        if is_slow or seconds > _LATE_SECONDS:
            plural = "s" if len(missed) > 1 else ""
            message = (
                f"rank {number} is {len(missed):,} recorded step{plural} behind: its last record "
                f"is of step {last:,}, most ranks are at step {newest[0]:,}"
            )
            message += f", {seconds:.0f} s later" if seconds > _LATE_SECONDS else ""
            yield RankFinding(
                BEHIND, (number,), f"rank {number}", Kind.METRIC, "", last, int(newest[0]), 0,
                message,
            )  # fmt: skip


def _times(table: Table, rows: Integers) -> Integers:
    return numbers(table.take(rows, ["time_ns"]).column("time_ns"))


def _record_at(table: Table, row: int) -> Record:
    """Return a record with the name, the kind and the tags of a row."""
    (tags,) = table.take(np.array([row]), ["tags"]).column("tags").to_pylist()
    name, kind = table.names[table.name[row]], Kind(table.kinds[table.kind[row]])
    return Record(name, kind, 0, 0, 0, 0, 1, 0, tags=dict(tags or ()))
