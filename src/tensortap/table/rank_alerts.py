"""Compare the ranks of a run on disk, and of a live session while records arrive."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tensortap.alerts import Alert, AlertMonitor, Rule
from tensortap.alerts.ballots import BALLOT, BallotBox
from tensortap.readers.run import RunReader
from tensortap.record import Kind, Record
from tensortap.runs.arrow import numbers
from tensortap.runs.rows import HEAD_COLUMNS, records_of
from tensortap.table.columns import VALUE, has_tag, is_valid
from tensortap.table.mesh import mesh_layout
from tensortap.table.rank_monitor import (
    COMPARED,
    KEPT_STEPS,
    PARAMETERS,
    RankLimits,
    RankMonitor,
    StepStatistics,
    Tensor,
    alike_key,
    is_alike,
)
from tensortap.table.table import Table

if TYPE_CHECKING:
    from tensortap.table.sources import Integers

_MOST_ROWS = 1 << 22  # of the newest steps
_CHUNK = 1 << 14  # rows
_SAMPLE = 256  # outputs that tell whether the model is tensor parallel
_OPEN_STEPS = 16  # that wait for the records of ranks that are behind
Cell = tuple[float, bool]  # a statistic, and whether it is not finite


def rank_alerts(table: Table, limits: RankLimits | None = None) -> list[Alert]:
    """Return alerts about the ranks of a run, over all of its steps, by step.

    Of a very large run, the newest steps are examined.
    """
    monitor = RankMonitor(limits)
    with table.lock:
        if len(table.ranks()) < 2:
            return []
        rows = _compared_rows(table)
        monitor.groups = _groups(table, rows)
        alerts = [a for found in _steps(table, rows) for a in monitor.compare(found)]
        for rank, step, time_ns in _arrivals(table, rows):
            monitor.reach(rank, step, time_ns)
    return sorted([*alerts, *monitor.late()], key=lambda alert: alert.step)


def run_alerts(table: Table, reader: object) -> list[Alert]:
    """Return the alerts that training raised, and those about the ranks of a run, by step.

    A live session raises the latter by itself.
    """
    alerts = table.alerts()
    if isinstance(reader, RunReader) and len(reader.ranks) > 1:
        alerts += [*rank_alerts(table), *ballot_alerts(reader)]
        alerts.sort(key=lambda alert: alert.step)
    return alerts


def ballot_alerts(reader: RunReader) -> list[Alert]:
    """Return alerts about replicas whose digests the ranks of a run recorded."""
    box = BallotBox()
    ballots = sorted(reader.records(BALLOT), key=lambda record: (record.step, record.rank))
    alerts = [alert for ballot in ballots for alert in box.add(reader.load(ballot))]
    return [*alerts, *box.close()]


def rule_alerts(table: Table, rules: Iterable[Rule] | bool) -> list[Alert]:
    """Return the alerts that rules raise for the whole tensors and the metrics of a table."""
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


def _compared_rows(table: Table) -> Integers:
    """Return the rows that are compared, by step and in the order of capture."""
    wanted = [i for i, kind in enumerate(table.kinds) if kind in COMPARED]
    rows = np.flatnonzero(np.isin(table.kind, wanted))
    if len(rows) > _MOST_ROWS:  # by step, because the rows of a run come rank by rank
        oldest = np.partition(table.step[rows], -_MOST_ROWS)[-_MOST_ROWS]
        rows = rows[table.step[rows] > oldest]
    parameters = [i for i, kind in enumerate(table.kinds) if kind in PARAMETERS]
    is_part = np.isin(table.kind[rows], parameters)
    shards = table.take(rows[is_part], ["shard_shape"]).column("shard_shape")
    is_part[is_part] = is_valid(shards)
    rows = rows[~is_part]
    return rows[np.lexsort((table.seq[rows], table.step[rows]))]


def _groups(table: Table, rows: Integers) -> dict[int, object]:
    mesh = mesh_layout(table)
    outputs = rows[table.kind[rows] == _code(table, Kind.ACTIVATION)][:_SAMPLE]
    is_tensor_parallel = bool(has_tag(table.take(outputs, ["tags"]), "placements").any())
    if mesh.dims == ("rank",):
        return {}
    chosen = [i for i, dim in enumerate(mesh.dims) if not is_alike(dim, is_tensor_parallel)]
    return {rank: tuple(at[i] for i in chosen) for rank, at in mesh.coordinates.items()}


def _steps(table: Table, rows: Integers) -> Iterator[StepStatistics]:
    """Yield the statistics of each step."""
    table.prefetch(("rm2", "count", "nans", "posinfs", "neginfs"))
    value = table.column("rm2")[rows]
    is_metric = table.kind[rows] == _code(table, Kind.METRIC)
    value[is_metric] = table.column(VALUE)[rows[is_metric]]
    bad = (table.nonfinite(rows) > 0) | ~np.isfinite(value)
    known = ~np.isnan(value) | (table.nonfinite(rows) > 0) | table.has_number(rows)
    rows, value, bad = rows[known], np.where(bad, np.nan, value)[known], bad[known]
    series = table.kind[rows].astype(np.int64) * len(table.names) + table.name[rows]
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
        kinds, names = np.divmod(codes[order], len(table.names))
        tensors = [
            (Kind(table.kinds[kind]), table.names[name])
            for kind, name in zip(kinds.tolist(), names.tolist(), strict=True)
        ]
        step = int(table.step[rows[start]])
        yield StepStatistics(step, ranks.tolist(), tensors, values, nonfinite)


def _arrivals(table: Table, rows: Integers) -> Iterator[tuple[int, int, int]]:
    """Yield rank, step and time of the last record of each rank in each of the newest steps."""
    steps = np.unique(table.step[rows])[-KEPT_STEPS:]
    rows = np.sort(rows[table.step[rows] >= steps.min(initial=0)])
    _, place = np.unique(np.stack([table.step[rows], table.rank[rows]]), axis=1, return_index=True)
    rows = np.sort(rows[place])
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
