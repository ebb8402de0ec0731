"""What a dashboard draws of a run: numbers and histograms under tags, record by record."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.api.run import Run
from tensortap.errors import TensortapError
from tensortap.record import Record
from tensortap.runs import rows as run_rows
from tensortap.table import logframe

if TYPE_CHECKING:
    import pyarrow as pa

STATISTICS = ("rm2", "mean", "std", "max_abs", "zeros", "nans", "posinfs", "neginfs")
_COLUMNS = [*logframe.COLUMNS, "time_ns"]
_AT_ONCE = 4096  # rows in memory


class Histogram(NamedTuple):
    """How many values there are per power of two, from `first` on."""

    tag: str
    first: int
    counts: list[int]

    @property
    def edges(self) -> list[int]:
        """The exponents between which they are, one more than counts."""
        return list(range(self.first, self.first + len(self.counts) + 1))


class Point(NamedTuple):
    """What is drawn of one record."""

    rank: int
    step: int
    seconds: float  # when it was captured
    numbers: dict[str, float]
    histogram: Histogram | None


def points(
    source: Any,
    *,
    names: str | None = None,
    statistics: Sequence[str] = STATISTICS,
    histograms: bool = True,
) -> Iterator[Point]:
    """The points of a run, a tracker, or any records, in order of capture; rank after rank.

    >>> from tensortap.record import Kind
    >>> record = Record("loss", Kind.METRIC, 3, 0, 0, 0, 1, 0, value=0.5)
    >>> [(point.step, point.numbers) for point in points([record])]
    [(3, {'loss': 0.5})]
    """
    unknown = [name for name in statistics if name not in run_rows.STATISTICS]
    if unknown:
        known = ", ".join(run_rows.STATISTICS)
        raise TensortapError(f"no statistic is called {', '.join(unknown)}; there are {known}")
    try:
        wanted = re.compile(names or "")
    except re.error as error:
        raise TensortapError(f"not a regular expression: {names!r} ({error})") from None
    return _points(source, wanted, statistics, histograms)


def _points(
    source: Any, wanted: re.Pattern[str], statistics: Sequence[str], histograms: bool
) -> Iterator[Point]:
    for tables in _tables(source):
        found = [point for table in tables for point in _numbers(table, wanted)]
        for table in tables:
            found += _statistics(table, wanted, statistics, histograms)
        yield from sorted(found, key=lambda point: (point.rank, point.step))


def _tables(source: Any) -> Iterator[list[pa.Table]]:
    """Some thousand rows at a time: a run may be larger than memory."""
    if not isinstance(source, Run):
        records = iter(getattr(source, "records", source))
        while some := list(itertools.islice(records, _AT_ONCE)):
            yield [_of_records(some)]
        return
    for whole in source.reader.tables(_COLUMNS):
        for start in range(0, whole.num_rows, _AT_ONCE):
            table = whole.slice(start, _AT_ONCE)
            lacking = _without_statistics(table)
            yield [table, _of_records(source.summarized(lacking))] if lacking else [table]


def _of_records(records: Iterable[Record]) -> pa.Table:
    import pyarrow as pa

    held = list(records)
    times = pa.array([record.time_ns for record in held], pa.int64())
    return logframe.table_of(held).append_column("time_ns", times)


def _without_statistics(table: pa.Table) -> list[tuple[str, int, int]]:
    """Name, rank and seq of the tensors that were caught as they are."""
    columns = ("name", "rank", "seq", "dtype", "count", "missing")
    rows = zip(*(table.column(name).to_pylist() for name in columns), strict=True)
    return [
        (name, rank, seq)
        for name, rank, seq, dtype, count, missing in rows
        if dtype and count is None and not missing
    ]


_HEADS = ("name", "rank", "step", "time_ns", "call")


def _numbers(table: pa.Table, wanted: re.Pattern[str]) -> Iterator[Point]:
    """Metrics, and numbers that were caught."""
    import pyarrow.compute as pc

    single = pc.and_(pc.is_valid(table.column("number")), pc.invert(table.column("missing")))
    single = pc.and_(single, pc.is_null(table.column("count")))
    rows = _rows(table.filter(single), [*_HEADS, "number"])
    for name, rank, step, time, call, number in rows:
        if wanted.search(name):
            yield Point(rank, step, time / 1e9, {_tag(name, call): number}, None)


def _statistics(
    table: pa.Table, wanted: re.Pattern[str], statistics: Sequence[str], histograms: bool
) -> Iterator[Point]:
    """Figures of tensors, and their exponents."""
    table = logframe.with_statistics(table)
    table = table.append_column("label", logframe.layer_names(table))
    table = table.append_column("tensor_type", logframe.tensor_types(table))
    extra = logframe.extra_statistics(table)
    columns = [*_HEADS, "label", "tensor_type", "first_bin", "bins", *statistics]
    for place, row in enumerate(_rows(table, columns)):
        name, rank, step, time, call, label, kind, first, bins, *values = row
        if not wanted.search(name):
            continue
        figures = dict(zip(statistics, values, strict=True))
        figures |= {
            key: column[place] for key, column in extra.items() if not math.isnan(column[place])
        }
        tagged = {_tag(f"{kind}/{n}/{label}", call): float(v) for n, v in figures.items()}
        histogram = None
        if histograms and bins:
            histogram = Histogram(_tag(f"{kind}/exponents/{label}", call), first, bins)
        yield Point(rank, step, time / 1e9, tagged, histogram)


def _rows(table: pa.Table, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(table.column(name).to_pylist() for name in columns), strict=True)


def _tag(name: str, call: int) -> str:
    return f"{name}/call{call}" if call else name
