"""Compare the ranks of a run on disk, and of a live session while records arrive."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tensortap.alerts import DEFAULT, RANK_RULES, Alert, AlertMonitor, Rule
from tensortap.alerts.ballots import BALLOT, BallotBox
from tensortap.alerts.rank_rules import RankLimits, is_of_ranks, rank_limits
from tensortap.readers.run import RunReader
from tensortap.record import Kind, Record
from tensortap.runs.arrow import numbers
from tensortap.runs.rows import HEAD_COLUMNS, records_of
from tensortap.table.columns import VALUE
from tensortap.table.mesh import mesh_layout
from tensortap.table.numbering import codes, distinct, first_of, stable_order
from tensortap.table.rank_monitor import (
    COMPARED,
    KEPT_STEPS,
    PARAMETERS,
    RankMonitor,
    StepStatistics,
    Tensor,
    alike_key,
    is_alike,
)
from tensortap.table.shard_keys import LAYOUT, SHARD
from tensortap.table.table import Table, locked

if TYPE_CHECKING:
    from tensortap.table.sources import Integers

_MOST_ROWS = 1 << 22  # of the newest steps
_CHUNK = 1 << 14  # rows
_OPEN_STEPS = 16  # that wait for the records of ranks that are behind
_MOST_OPEN_STEPS = 256  # of a run: a rank writes its records many steps at a time
Cell = tuple[float, bool]  # a statistic, and whether it is not finite


class RunRanks:
    """Compares the ranks of a run; `alerts` reads only the rows that came since the last call.

    Of a very large run, the newest steps are examined. A rank that is late does not keep others
    from being compared: what it records of their steps afterwards does not count. `world_size` is
    the number of ranks, some of which may have written nothing yet.
    """

    def __init__(
        self, table: Table, limits: RankLimits | None = None, *, world_size: int = 0
    ) -> None:
        self._table, self._world_size = table, world_size
        self._monitor = RankMonitor(limits)
        self._examined = 0  # rows
        self._open = np.empty(0, np.int64)  # rows of steps for which records may be missing
        self._closed = -1  # the last step that was compared
        self._alerts: list[Alert] = []
        self._is_tensor_parallel = False

    def alerts(self) -> list[Alert]:
        """Return the alerts so far, and who is late now, by step."""
        table, monitor = self._table, self._monitor
        with table.lock:
            if len(table.ranks()) < 2:
                return []
            rows = _compared_rows(table, self._examined)
            self._examined = len(table)
            self._group(rows)
        # without the lock, so that others can read the table: reported rows of a run do not change
        for rank, step, time_ns in _arrivals(table, rows):
            monitor.reach(rank, step, time_ns)
        late = list(monitor.all_late())
        closed, self._open = self._complete(rows, {alert.rank for alert in late})
        self._alerts += [a for found in _steps(table, closed) for a in monitor.compare(found)]
        waiting = monitor.preview(_steps(table, self._open))
        return sorted([*self._alerts, *waiting, *late], key=lambda alert: alert.step)

    def _group(self, rows: Integers) -> None:
        """Tell which ranks should be alike."""
        table, mesh = self._table, mesh_layout(self._table)
        outputs = rows[table.kind[rows] == _code(table, Kind.ACTIVATION)]
        self._is_tensor_parallel |= bool(table.shard_keys().has(LAYOUT, outputs).any())
        if mesh.dims == ("rank",):
            return
        fixed = [i for i, d in enumerate(mesh.dims) if not is_alike(d, self._is_tensor_parallel)]
        self._monitor.groups = {
            rank: tuple(at[i] for i in fixed) for rank, at in mesh.coordinates.items()
        }

    def _complete(self, rows: Integers, late: set[int]) -> tuple[Integers, Integers]:
        """Return the rows of steps that all ranks but late ones have passed, and the others."""
        step = self._table.step
        rows = np.concatenate([self._open, rows[step[rows] > self._closed]])
        rows = rows[stable_order(self._table.seq[rows])]
        rows = rows[stable_order(step[rows])]
        steps = distinct(step[rows])
        last = self._monitor.last_steps
        is_known = len(last) >= self._world_size
        passed = min((last[rank] for rank in last if is_known and rank not in late), default=0)
        newest = steps[-_MOST_OPEN_STEPS - 1 : -_MOST_OPEN_STEPS].max(initial=-1)
        self._closed = max(self._closed, passed - 1, int(newest))
        is_closed = step[rows] <= self._closed
        return rows[is_closed], rows[~is_closed]


@locked  # a table of a live session may start over
def rank_alerts(table: Table, limits: RankLimits | None = None) -> list[Alert]:
    """Return alerts about the ranks of a run, by step."""
    return RunRanks(table, limits).alerts()


def run_alerts(table: Table, reader: object, ranks: RunRanks | None = None) -> list[Alert]:
    """Return the alerts that training raised, and those about the ranks of a run, by step.

    A live session raises the latter by itself. `ranks` has compared some of its rows before.
    """
    alerts = table.alerts()
    if isinstance(reader, RunReader) and len(reader.ranks) > 1:
        alerts += (ranks or RunRanks(table)).alerts()
        if BALLOT in table.names:
            alerts += ballot_alerts(reader)
        alerts.sort(key=lambda alert: alert.step)
    return alerts


def ballot_alerts(reader: RunReader) -> list[Alert]:
    """Return alerts about replicas whose digests the ranks of a run recorded."""
    box = BallotBox()
    ballots = sorted(reader.records(BALLOT), key=lambda record: (record.step, record.rank))
    alerts = [alert for ballot in ballots for alert in box.add(reader.load(ballot))]
    return [*alerts, *box.close()]


def rule_alerts(table: Table, rules: Iterable[Rule] | bool) -> list[Alert]:
    """Return the alerts that rules raise: about whole tensors and metrics, and about ranks."""
    given = [*DEFAULT, *RANK_RULES] if rules is True else list(rules or ())
    of_ranks = [rule for rule in given if is_of_ranks(rule)]
    found = rank_alerts(table, rank_limits(of_ranks)) if of_ranks else []
    others = [rule for rule in given if not is_of_ranks(rule)]
    return sorted([*_whole_alerts(table, others), *found], key=lambda alert: alert.step)


def _whole_alerts(table: Table, rules: list[Rule]) -> list[Alert]:
    if not rules:
        return []
    whole = table.whole()
    monitor = AlertMonitor(rules)
    with table.lock:
        order = np.lexsort((whole.rank, whole.seq, whole.step))
        for start in range(0, len(order), _CHUNK):
            chosen = order[start : start + _CHUNK]
            found = zip(
                records_of(whole.take(chosen, list(HEAD_COLUMNS))), whole.has_number(chosen),
                whole.column(VALUE)[chosen], strict=True,
            )  # fmt: skip
            for record, has_number, number in found:
                value = float(number) if has_number else None
                monitor.see(msgspec.structs.replace(record, value=value))
    return list(monitor.alerts)


def _compared_rows(table: Table, start: int) -> Integers:
    """Return the rows from `start` on that are compared."""
    wanted = [i for i, kind in enumerate(table.kinds) if kind in COMPARED]
    rows = start + np.flatnonzero(np.isin(table.kind[start:], wanted))
    if len(rows) > _MOST_ROWS:  # by step, because the rows of a run come rank by rank
        oldest = np.partition(table.step[rows], -_MOST_ROWS)[-_MOST_ROWS]
        rows = rows[table.step[rows] > oldest]
    parameters = [i for i, kind in enumerate(table.kinds) if kind in PARAMETERS]
    is_parameter = np.isin(table.kind[rows], parameters)
    return rows[~(is_parameter & table.shard_keys().has(SHARD, rows))]


def _steps(table: Table, rows: Integers) -> Iterator[StepStatistics]:
    """Yield the statistics of each step."""
    table.prefetch(("rm2", "count", "nans", "posinfs", "neginfs"))
    value = table.column("rm2")[rows]
    is_metric = table.kind[rows] == _code(table, Kind.METRIC)
    value[is_metric] = table.column(VALUE)[rows[is_metric]]
    bad = (table.nonfinite(rows) > 0) | ~np.isfinite(value)
    known = ~np.isnan(value) | (table.nonfinite(rows) > 0) | table.has_number(rows)
    rows, value, bad = rows[known], np.where(bad, np.nan, value)[known], bad[known]
    count = len(table.names)  # another thread may add some meanwhile
    series = table.kind[rows].astype(np.int64) * count + table.name[rows]
    edges = np.flatnonzero(np.diff(table.step[rows])) + 1
    for start, stop in itertools.pairwise([0, *edges.tolist(), len(rows)]):
        if start == stop:
            continue
        ranks, row = np.unique(table.rank[rows[start:stop]], return_inverse=True)
        codes, first, column = np.unique(series[start:stop], return_index=True, return_inverse=True)
        order = np.argsort(first)  # of capture
        column = np.argsort(order)[column]
        values = np.full((len(ranks), len(codes)), np.nan)
        values[row, column] = value[start:stop]  # of several calls, the last
        nonfinite = np.zeros(values.shape, np.bool_)
        nonfinite[row, column] = bad[start:stop]
        kinds, names = np.divmod(codes[order], count)
        tensors = [
            (Kind(table.kinds[kind]), table.names[name])
            for kind, name in zip(kinds.tolist(), names.tolist(), strict=True)
        ]
        step = int(table.step[rows[start]])
        yield StepStatistics(step, ranks.tolist(), tensors, values, nonfinite)


def _arrivals(table: Table, rows: Integers) -> Iterator[tuple[int, int, int]]:
    """Yield rank, step and time of the first record of each rank in each of the newest steps."""
    steps = distinct(table.step[rows])[-KEPT_STEPS:]
    rows = rows[table.step[rows] >= steps.min(initial=0)]
    rows = np.sort(rows[first_of(codes(table.step[rows], table.rank[rows]))])
    times = numbers(table.take(rows, ["time_ns"]).column("time_ns"))
    order = np.argsort(table.step[rows], kind="stable")
    yield from zip(
        table.rank[rows][order].tolist(), table.step[rows][order].tolist(),
        times[order].tolist(), strict=True,
    )  # fmt: skip


def _code(table: Table, kind: Kind) -> int:
    return table.kinds.index(kind.value) if kind.value in table.kinds else -1


class LiveRanks:
    """Shows the records of a live session to a `RankMonitor`, as they arrive."""

    def __init__(self, limits: RankLimits | None = None) -> None:
        self._monitor = RankMonitor(limits)
        self._open: dict[int, dict[Tensor, dict[int, Cell]]] = {}  # by step
        self._last: dict[int, int] = {}  # rank → step
        self._meshes: dict[int, str] = {}
        self._is_tensor_parallel = False
        self._closed = -1  # the last step that was compared

    def see(self, records: Iterable[Record], now_ns: int | None = None) -> list[Alert]:
        """Take records in the order of their arrival; return new alerts.

        `now_ns` is the time if no more records have arrived: only then can it be told who is late.
        """
        for record in records:
            if record.kind in COMPARED:
                self._take(record)
        alerts: list[Alert] = []
        complete = min(self._last.values(), default=0)  # all ranks are at this step or further
        for step in sorted(self._open):
            if step < complete or len(self._open) > _OPEN_STEPS:
                alerts += self._compare(step, self._open.pop(step))
        return alerts if now_ns is None else [*alerts, *self._monitor.late(now_ns)]

    def _take(self, record: Record) -> None:
        rank, step, tags = record.rank, record.step, record.tags
        self._last[rank] = max(step, self._last.get(rank, step))
        self._monitor.reach(rank, step, record.time_ns)
        if "mesh" in tags and len(tags["mesh"]) > len(self._meshes.get(rank, "")):
            self._meshes[rank] = tags["mesh"]
        self._is_tensor_parallel |= record.kind is Kind.ACTIVATION and "placements" in tags
        cell = cell_of(record)
        if step > self._closed and cell is not None:
            tensors = self._open.setdefault(step, {})
            tensors.setdefault((record.kind, record.name), {})[rank] = cell

    def _compare(self, step: int, found: Mapping[Tensor, Mapping[int, Cell]]) -> Iterator[Alert]:
        self._closed = max(self._closed, step)
        self._monitor.groups = {
            rank: alike_key(mesh, self._is_tensor_parallel) for rank, mesh in self._meshes.items()
        }
        ranks, tensors = sorted({rank for each in found.values() for rank in each}), list(found)
        rows = {rank: row for row, rank in enumerate(ranks)}
        value = np.full((len(ranks), len(tensors)), np.nan)
        nonfinite = np.zeros(value.shape, np.bool_)
        for column, tensor in enumerate(tensors):
            for rank, cell in found[tensor].items():
                value[rows[rank], column], nonfinite[rows[rank], column] = cell
        return self._monitor.compare(StepStatistics(step, ranks, tensors, value, nonfinite))


def cell_of(record: Record) -> Cell | None:
    """Return the root mean square of a tensor or the value of a metric, and whether it is bad.

    Shards of a parameter are different parts of it, so they are not compared.
    """
    if record.kind in PARAMETERS and record.shard is not None:
        return None
    stats = record.stats
    number = record.value if stats is None else stats.rm2
    if not isinstance(number, (float, int)):
        return None
    bad = not math.isfinite(number) or (stats is not None and stats.finite < stats.count)
    return (math.nan, True) if bad else (number, False)
