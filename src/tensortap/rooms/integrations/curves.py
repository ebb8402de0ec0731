"""Curves of a run for dashboards: numbers and histograms under tags, record by record."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tensortap.core.patterns import compile_pattern
from tensortap.rooms.logframe import frame as labels
from tensortap.runs.run_reader import RunReader
from tensortap.table.columns import VALUE
from tensortap.table.frames import choose_rank, complete_table
from tensortap.table.table import Table, table_of

STATISTICS = ("rm2", "mean", "std", "max_abs", "zeros", "nans", "posinfs", "neginfs")
_CHUNK = 8192  # rows in memory


class ExponentHistogram(NamedTuple):
    """Counts of values per power of two, from 2^`first` on."""

    tag: str
    first: int
    counts: list[int]

    @property
    def edges(self) -> list[int]:
        """The exponents between the bins, one more than counts."""
        return list(range(self.first, self.first + len(self.counts) + 1))


class CurvePoint(NamedTuple):
    """The values of one record that a dashboard draws."""

    rank: int
    step: int
    seconds: float  # time of capture
    numbers: dict[str, float]
    histogram: ExponentHistogram | None


def curve_points(
    source: Any, *, names: str | None = None, rank: int | str | None = None
) -> Iterator[CurvePoint]:
    """Yield the points of a run, a tracker, or any records, by rank, step and order of capture.

    `rank` is as for `run.stats`.

    >>> from tensortap.core.record import Kind, Record
    >>> record = Record("loss", Kind.METRIC, 3, 0, 0, 0, 1, 0, value=0.5)
    >>> [(point.step, point.numbers) for point in curve_points([record])]
    [(3, {'loss': 0.5})]
    """
    reader = getattr(source, "reader", None)
    table = complete_table(reader) if isinstance(reader, RunReader) else table_of(source)
    return _points(*choose_rank(table, rank), compile_pattern(names or ""))


def _points(table: Table, rank: int | None, wanted: re.Pattern[str]) -> Iterator[CurvePoint]:
    chosen = np.array([bool(wanted.search(name)) for name in table.names], np.bool_)
    order = np.lexsort((table.seq, table.step, table.rank))
    order = order[chosen[table.name[order]] & (rank is None or table.rank[order] == rank)]
    for start in range(0, len(order), _CHUNK):
        rows = order[start : start + _CHUNK]
        found = [*_numbers(table, rows), *_statistics(table, rows)]
        yield from sorted(found, key=lambda point: (point.rank, point.step))


def _numbers(table: Table, rows: Any) -> Iterator[CurvePoint]:
    """Yield metrics and caught numbers."""
    rows = rows[table.has_number(rows) & np.isnan(table.column("count")[rows])]
    seconds = table.take(rows, ["time_ns"]).column("time_ns").to_pylist()
    numbers = table.column(VALUE)
    for row, time in zip(rows.tolist(), seconds, strict=True):
        tag = _tag(table.names[table.name[row]], table.call[row])
        point = {tag: float(numbers[row])}
        yield CurvePoint(int(table.rank[row]), int(table.step[row]), time / 1e9, point, None)


def _statistics(table: Table, rows: Any) -> Iterator[CurvePoint]:
    """Yield the statistics of tensors and their exponents."""
    columns = ["time_ns", "tags", "value", "first_bin", "bins"]
    rows, cells = labels.rows_with_statistics(table, columns, rows)
    figures = {name: table.column(name)[rows] for name in STATISTICS}
    labels.add_stash(figures, cells)
    names = labels.layer_names(table, rows, cells).to_pylist()
    kinds = labels.tensor_types(table, rows, cells).to_pylist()
    times, first_bins, bins = (
        cells.column(name).to_pylist() for name in ("time_ns", "first_bin", "bins")
    )
    for index, row in enumerate(rows.tolist()):
        call, kind, label = table.call[row], kinds[index], names[index]
        tagged = {
            _tag(f"{kind}/{name}/{label}", call): float(column[index])
            for name, column in figures.items()
            if name in STATISTICS or not math.isnan(column[index])
        }
        histogram = None
        if bins[index]:
            tag = _tag(f"{kind}/exponents/{label}", call)
            histogram = ExponentHistogram(tag, first_bins[index], bins[index])
        where = int(table.rank[row]), int(table.step[row]), times[index] / 1e9
        yield CurvePoint(*where, tagged, histogram)


def _tag(name: str, call: int) -> str:
    return f"{name}/call{call}" if call else name
