"""One query that compares the ranks of a job, over the table of a run or of a live session.

It finds replicas that differ (``replicas``), ranks whose statistics are far from those of the other
ranks (``outlier``), and ranks that are behind (``behind``). All three read columns of the table;
Python objects are made only of what is found.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from tensortap.alerts import Alert
from tensortap.alerts.alert import module_of
from tensortap.core.record import Kind, Record
from tensortap.rooms.ranks.norms import ClippedNorms, SameLosses
from tensortap.rooms.ranks.ranks import (
    RankProgress,
    alike_groups,
    compared,
    last_times,
    progress,
)
from tensortap.rooms.ranks.suspects import (
    PARAMETERS,
    REPLICATED,
    Series,
    is_kind,
    names_of,
    replicas_of,
    suspects,
    values_of,
)
from tensortap.runs.arrow import numbers
from tensortap.table.columns import mixed
from tensortap.table.numbering import codes
from tensortap.table.shard_keys import PARTIAL, SHARD
from tensortap.table.table import Table

if TYPE_CHECKING:
    from tensortap.table.sources import Integers

REPLICAS, OUTLIER, BEHIND = RULES = ("replicas", "outlier", "behind")
"""The rules of findings."""

_PATIENCE = 5  # recorded steps in a row in which a rank must be far
_LATE_STEPS = 10  # recorded steps by which a rank is behind
_LATE_SECONDS = 60.0  # without a record of a rank, while most ranks have come further
_WITNESSES = 15  # ranks whose times tell when most ranks reached a step
_TOGETHER = 1 << 20  # rows that are compared together; bounds memory
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
    made = progress(table)
    if len(made.ranks) < 2:
        return []
    found = list(_late_findings(table, made, now_ns))
    end = np.iinfo(np.int64).max
    if settled:
        late = [each.ranks[0] for each in found]
        end = made.last[~np.isin(made.ranks, late)].min()
    far: list[_Far] = []
    unequal: list[_Unequal] = []
    for few, batch in _batches(table, sorted(suspects(table)), len(made.ranks)):
        series = [_rows_of(few, kind, name, end) for kind, name in batch]
        groups = alike_groups(table)
        for each in series:
            far += _far_tensors(few, each, groups)
        unequal += _unequal_tensors(few, series)
    found += _far_findings(table, far)
    found += _unequal_findings(table, unequal)
    return sorted(found, key=lambda each: each.step)


def _batches(
    table: Table, series: list[Series], ranks: int
) -> Iterator[tuple[Table, list[Series]]]:
    """Yield tables with all rows of some tensors; what is recorded of a parameter stays together.

    So a name counts as replicated if its gradients are, and memory is bounded.
    """
    by_name: dict[str, list[Series]] = {}
    for kind, name in series:
        key = name if kind in PARAMETERS else f"{kind} {name}"
        by_name.setdefault(key, []).append((kind, name))
    together = max(1, _TOGETHER // (ranks * len(table.steps())))
    groups = list(by_name.values())
    for start in range(0, len(groups), together):
        batch = [each for group in groups[start : start + together] for each in group]
        yield table.near(batch), batch


class _SeriesRows(NamedTuple):
    """The rows of a tensor by step and rank; `order` is which recorded step each is of."""

    kind: str
    name: str
    rows: Integers
    order: Integers


def _rows_of(table: Table, kind: str, name: str, end: int) -> _SeriesRows:
    rows = table.series(kind, name)
    rows = rows[table.step[rows] < end]
    return _SeriesRows(kind, name, rows, codes(table.step[rows]))


class GrowingFindings:
    """Findings in a table that grows, as alerts; finding them again takes little time."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._others = ClippedNorms(table), SameLosses(table)
        self._known: list[Alert] = []
        self._version: tuple[int, int] | None = None
        self._next = 0.0  # when to look again

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that apply to the table."""
        several = len(self._table.ranks()) > 1
        return (*RULES, *(rule for each in self._others for rule in each.rules)) if several else ()

    def get(self) -> list[Alert]:
        """Return what has been found, perhaps a little while ago."""
        version = self._table.generation, self._table.version
        start = time.monotonic()
        if version != self._version and start >= self._next:
            found = rank_findings(self._table)
            self._known = [each.alert for each in found]
            self._known += [alert for each in self._others for alert in each.get()]
            self._version = version
            end = time.monotonic()
            self._next = end + (end - start) / _SHARE
        return list(self._known)


# -- statistics that are far from those of other ranks -------------------------------------------


def _episodes(key: Integers, order: Integers, length: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last position of `length` or more cells of a key in a row."""
    by_key = np.lexsort((order, key))
    key, order = key[by_key], order[by_key]
    starts = np.flatnonzero((np.diff(key, prepend=-1) != 0) | (np.diff(order, prepend=-2) > 1))
    ends = np.append(starts[1:], len(key))[: len(starts)]
    long = ends - starts >= length
    yield from zip(by_key[starts[long]].tolist(), by_key[ends[long] - 1].tolist(), strict=True)


class _Far(NamedTuple):
    """A tensor of a rank that is far for some steps."""

    rank: int
    step: int
    seq: int
    last_step: int
    kind: str
    name: str
    value: float
    median: float
    is_bad: bool


def _far_tensors(table: Table, own: _SeriesRows, groups: Sequence[Sequence[int]]) -> Iterator[_Far]:
    """Yield for which steps and ranks a tensor is far; shards are not compared."""
    value, bad = values_of(table, own.rows)
    known = ~np.isnan(value) | bad
    if own.kind in PARAMETERS:
        known &= ~table.shard_keys().has(SHARD, own.rows)
    rows, order, value, bad = own.rows[known], own.order[known], value[known], bad[known]
    matrix = compared(table.rank[rows], order, value, bad, groups)
    if not matrix.far.any():
        return
    at = np.zeros(matrix.far.shape, np.int64)
    at[codes(table.rank[rows]), codes(order)] = np.arange(len(rows))
    chosen, median = at[matrix.far], matrix.median[matrix.far]
    step, seq = table.step[rows[chosen]], table.values_at("seq", rows[chosen])
    rank = table.rank[rows[chosen]]
    for first, last in _episodes(codes(rank), order[chosen], _PATIENCE):
        number = float(value[chosen[first]])
        is_bad = bool(bad[chosen[first]]) or not np.isfinite(number)
        yield _Far(
            int(rank[first]), int(step[first]), int(seq[first]), int(step[last]), own.kind,
            own.name, number, float(median[first]), is_bad,
        )  # fmt: skip


def _far_findings(table: Table, found: list[_Far]) -> Iterator[RankFinding]:
    """Yield one finding for each rank and time in which some of its tensors are far."""
    for members in _overlapping(sorted(found)):
        one = members[0]
        what = "value" if one.kind == Kind.METRIC else "RMS"
        held = "it holds NaN or Inf" if one.is_bad else f"its {what} is {one.value:.4g}"
        tensors = len({(each.kind, each.name) for each in members})
        more = f"; {tensors:,} of its tensors are far" if tensors > 1 else ""
        message = (
            f"rank {one.rank} is far from the other ranks since step {one.step:,}: "
            f"{held}, their median is {one.median:.4g}{more}"
        )
        yield RankFinding(
            OUTLIER, (one.rank,), one.name, Kind(one.kind), _module(table, one.kind, one.name),
            one.step, max(each.last_step for each in members), tensors, message,
        )  # fmt: skip


def _overlapping(found: list[_Far]) -> Iterator[list[_Far]]:
    """Yield the episodes of each rank that overlap; `found` is by rank and first step."""
    members: list[_Far] = []
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


class _Unequal(NamedTuple):
    """A tensor of which some ranks are outvoted for some steps."""

    step: int
    seq: int
    kind: str
    name: str
    ranks: tuple[int, ...]
    replicas: int
    last_step: int


def _unequal_tensors(table: Table, series: Sequence[_SeriesRows]) -> Iterator[_Unequal]:
    """Yield weights and optimizer state that differ, by statistics and digests.

    Plain tensors with the same name need not be replicas: ranks may train models of their own, or
    split tensors by hand. They count as replicas if most ranks had the same one at some time, or
    its gradient. If all elements are equal, as those of biases and norms at first, this tells
    nothing before the third record: a warmup may leave them as they are in the first step.
    """
    series = [each for each in series if each.kind in PARAMETERS and len(each.rows)]
    if not series:
        return
    rows, order = (np.concatenate([each[i] for each in series]) for i in (2, 3))
    number = np.repeat(np.arange(len(series)), [len(each.rows) for each in series])
    keys = table.shard_keys()
    wanted = (table.column("count")[rows] > 0) & ~keys.has(PARTIAL, rows)
    rows, order, number = rows[wanted], order[wanted], number[wanted]
    cell, bits = replicas_of(table, rows)
    size, content = np.bincount(cell)[cell], codes(cell, bits.view(np.int64))
    is_right, is_shard = 2 * np.bincount(content)[content] > size, keys.has(SHARD, rows)
    tells = is_shard | (order > 1) | (table.column("min")[rows] != table.column("max")[rows])
    alike = np.unique(table.name[rows[(size > 1) & (is_shard | is_right) & tells]])
    chosen = ~is_right & is_kind(table, REPLICATED, rows) & np.isin(table.name[rows], alike)
    rows, order, number, cell, size = (c[chosen] for c in (rows, order, number, cell, size))
    by = np.lexsort((table.rank[rows], cell, number, order))
    rows, order, number, cell, size = (c[by] for c in (rows, order, number, cell, size))
    step, rank, seq = table.step[rows], table.rank[rows], table.values_at("seq", rows)
    starts = np.flatnonzero(np.diff(codes(order, number, cell), prepend=-1))  # of each tensor
    ends = np.append(starts[1:], len(rows))
    # the same number for the same ranks
    ranks = np.add.reduceat(mixed([rank], len(rank)), starts) if len(rows) else starts
    key = codes(ranks.view(np.int64), number[starts])
    for first, last in _episodes(key, order[starts], 1):
        at, own = starts[first], series[number[starts[first]]]
        yield _Unequal(
            int(step[at]), int(seq[at]), own.kind, own.name,
            tuple(rank[at : ends[first]].tolist()), int(size[at]), int(step[starts[last]]),
        )  # fmt: skip


def _unequal_findings(table: Table, found: list[_Unequal]) -> Iterator[RankFinding]:
    """Yield one finding for tensors of the same ranks that begin to differ at the same step."""
    begun: dict[tuple[int, tuple[int, ...]], list[_Unequal]] = {}
    for each in sorted(found):
        begun.setdefault((each.step, each.ranks), []).append(each)
    for members in begun.values():
        one, tensors = members[0], len({(each.kind, each.name) for each in members})
        what = f"{one.name} ({one.kind})"
        if len(one.ranks) < one.replicas:
            has = "has" if len(one.ranks) == 1 else "have"
            message = f"{_words(one.ranks)} {has} another {what} than the other "
            message += f"{one.replicas - len(one.ranks):,} since step {one.step:,}"
        else:
            message = f"{what} differs between {_words(one.ranks)} since step {one.step:,}, "
            message += "without a majority"
        message += f"; {tensors:,} tensors differ" if tensors > 1 else ""
        yield RankFinding(
            REPLICAS, one.ranks, one.name, Kind(one.kind), _module(table, one.kind, one.name),
            one.step, max(each.last_step for each in members), tensors, message,
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
    return list(_late_findings(table, progress(table), now_ns))


def _late_findings(table: Table, made: RankProgress, now_ns: int | None) -> Iterator[RankFinding]:
    half = len(made.ranks) // 2
    newest = np.sort(made.last)[::-1][half : half + 1]  # more than half of the ranks were so far
    late = made.last < newest
    if not late.any():
        return
    # to read times of all ranks takes long: a few of those that are not late stand for most
    others = made.ranks[~late][:_WITNESSES]
    times = last_times(table, made, np.append(others, made.ranks[late]))
    now = int(np.median([times[each] for each in others.tolist()])) if now_ns is None else now_ns
    steps = table.steps()
    steps = steps[steps <= newest]
    for number, last in zip(made.ranks[late].tolist(), made.last[late].tolist(), strict=True):
        missed = steps[np.searchsorted(steps, last, side="right") :]
        seconds = (now - times[number]) / 1e9
        is_slow = False
        if len(missed) >= _LATE_STEPS:
            # records may arrive late: what counts is how far most ranks were at that time
            reached = _reached(table, int(missed[_LATE_STEPS - 1]), others)
            is_slow = 2 * sum(time <= times[number] for time in reached) > len(others)
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


def _reached(table: Table, step: int, ranks: Integers) -> list[int]:
    """Return when ranks recorded a step: the first tensor that each has there."""
    whole, found = table.index(), dict[int, int]()
    for kind, name in sorted(names_of(whole, np.flatnonzero(whole.step == step))):
        few = table.near([(kind, name)])
        rows = few.series(kind, name)
        rows = rows[(few.step[rows] == step) & np.isin(few.rank[rows], ranks)]
        times = numbers(few.take(rows, ["time_ns"]).column("time_ns")).tolist()
        for rank, time_ns in zip(few.rank[rows].tolist(), times, strict=True):
            found.setdefault(rank, time_ns)
        if len(found) == len(ranks):
            break
    return list(found.values())


def _module(table: Table, kind: str, name: str) -> str:
    """Return the module of a tensor."""
    few = table.near([(kind, name)])
    (tags,) = few.take(few.series(kind, name)[:1], ["tags"]).column("tags").to_pylist()
    return module_of(Record(name, Kind(kind), 0, 0, 0, 0, 1, 0, tags=dict(tags or ())))
