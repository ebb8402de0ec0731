"""One columnar table of records' metadata and statistics, whatever they are read from.

    table = table_of(run)
    rows = table.rows(kind="Activation", names=["output"])
    table.step[rows], table.column("rm2")[rows]

Names, kinds and dtypes are interned: their columns hold codes. A statistic is read when it is
first needed. `refresh` reads only new rows.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from tensortap.alerts import Alert
from tensortap.core.errors import NotFound
from tensortap.core.record import Kind, Record, Summary
from tensortap.runs.arrow import numbers, row_indices
from tensortap.runs.rows import STATISTICS
from tensortap.runs.run_reader import RunReader
from tensortap.table.columns import (
    HAS_NUMBER,
    NONFINITE,
    NONFINITE_COUNTS,
    VALUE,
    GrowingArray,
    InternedColumn,
    SeriesIndex,
    StoredAlerts,
    digest_bits,
    is_valid,
    mean_per_step,
    mixed,
    no_such,
)
from tensortap.table.kinds import KINDS
from tensortap.table.shard_keys import ShardKeys
from tensortap.table.sources import (
    RecordSource,
    RowBlock,
    RowSource,
    RunSource,
    read_blocks,
    source_of,
    take_rows,
)
from tensortap.table.whole import RolledSource, WholeBlock, WholeSource

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from tensortap.runs.windows import Window
    from tensortap.table.sources import Integers

    Floats = NDArray[np.float64]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_TEXTS = ("name", "kind", "dtype")
_INTEGERS = {"step": np.int64, "rank": np.int32, "call": np.int64, "seq": np.int64}
_INDEX = (*_TEXTS, "names", "kinds", "dtypes", "step", "rank")
_NOT_LAYERS = (Kind.METRIC.value, Kind.ALERT.value)
_BOUNDED_ROWS = 1_000_000  # from here on the table of a bounded source starts over


class Table:
    """Metadata and statistics of records, one row per record; see `table_of`.

    `name`, `kind` and `dtype` hold codes for `names`, `kinds` and `dtypes`; `step`, `rank`,
    `call` and `seq` hold integers.
    """

    name: NDArray[np.int32]
    kind: NDArray[np.int32]
    dtype: NDArray[np.int32]
    step: Integers
    rank: NDArray[Any]
    lock: AbstractContextManager[bool]  # hold it to keep the rows unchanged

    def __init__(self, open_source: Callable[[], RowSource], parts: Table | None = None) -> None:
        self.version = 0  # increases whenever rows were added
        self.generation = 0  # increases whenever the table starts over
        self.lock = threading.RLock() if parts is None else parts.lock
        self._parts = parts
        self._whole: Table | None = None
        self._open_source = open_source
        self._limit = _BOUNDED_ROWS
        self._few: tuple[object, Table] | None = None  # a part of the rows, and which it is
        self._start()
        if not self._source.is_large:
            self._refresh()

    def _start(self) -> None:
        self.generation += 1
        self._source = self._open_source()
        self._appended: list[RowBlock] = []
        self._is_read = False
        self._texts = {name: InternedColumn() for name in _TEXTS}
        self._texts["name"].extend_coded(np.empty(0, np.int64), list(self._source.names))
        self._integers = {name: GrowingArray(kind) for name, kind in _INTEGERS.items()}
        self._statistics: dict[str, GrowingArray] = {}
        self._keys, self._contents = ShardKeys(), GrowingArray(np.uint64)
        self._digests = GrowingArray(np.uint64)
        self._index = SeriesIndex()
        self._alerts = StoredAlerts()

    def __getattr__(self, name: str) -> Any:
        """Read the index columns when one of them is first needed: until then they are not set."""
        if name not in _INDEX or self._is_read:
            raise AttributeError(name)
        self._refresh()
        return getattr(self, name)

    def index(self) -> Table:
        """Return this table; before its rows are read, its whole tensors, which are fewer.

        Both have the same names, kinds and steps, metrics and alerts.
        """
        return self if self._is_read else self.whole()

    def near(self, series: Collection[tuple[str, str]]) -> Table:
        """Return a table with all rows of some kinds and names, and few others, if that is less."""
        return self._part(tuple(series), lambda source: source.near(series))

    def at_step(self, step: int) -> Table:
        """Return a table with all rows of a step, and few others if that is less."""
        return self._part(step, lambda source: source.loose(np.array([step])))

    def compacted(self) -> tuple[tuple[Window, ...], Table] | None:
        """Return the windows of a compacted run, and a table of all other rows."""
        with self.lock:
            if not isinstance(self._source, RunSource) or not self._source.windows:
                return None
            found = self._source.loose(np.empty(0, np.int64))
            return found.windows, Table(lambda: found)

    def _part(self, key: object, opened: Callable[[RunSource], RunSource]) -> Table:
        with self.lock:
            source = self._source
            if self._is_read or not isinstance(source, RunSource):
                return self
            if self._few is None or self._few[0] != key:
                self._few = key, Table(lambda: opened(source))
            return self._few[1]

    def _publish(self) -> None:
        """Set the attributes that hold the index columns, one entry per row."""
        self._is_read = True
        self.names, self.kinds, self.dtypes = (self._texts[name].texts for name in _TEXTS)
        self.name, self.kind, self.dtype = (self._texts[name].rows.values for name in _TEXTS)
        self.step, self.rank = (self._integers[name].values for name in ("step", "rank"))

    def __len__(self) -> int:
        return len(self.step)

    def records(self) -> int:
        """Return the number of records, without reading them."""
        if self._is_read or not isinstance(self._source, RunSource):
            return len(self)
        return sum(self._source.reader.counts().values())

    @property
    def call(self) -> Integers:
        """Which call of a name within its step each row is of."""
        return self.values_at("call")

    @property
    def seq(self) -> Integers:
        """The order of capture of the rows of a rank."""
        return self.values_at("seq")

    def values_at(self, name: str, rows: Integers | None = None) -> NDArray[Any]:
        """Return an index column or a statistic of some rows, or of all."""
        with self.lock:
            column = self._integers.get(name) or self._statistic(name)
            return column.values[: len(self)] if rows is None else column.values[rows]

    def refresh(self) -> bool:
        """Read new rows; return whether there were any."""
        with self.lock:
            if self._parts is not None:
                self._parts.refresh()
            if self._is_read or not isinstance(self._source, RunSource):
                return self._refresh()
            self._source.reader.refresh()
            self._few = None
            self.version += 1
            return False

    def _refresh(self) -> bool:
        if not self._read_new_rows():
            return False
        if self._source.bounded and len(self) > self._limit:
            self._start()  # evicted rows disappear
            self._read_new_rows()
            self._limit = max(_BOUNDED_ROWS, 2 * len(self))
        self.version += 1
        return True

    def whole(self) -> Table:
        """Return a table of whole tensors, which merges what the ranks recorded of each."""
        with self.lock:
            is_one = self._is_read and self._whole is None and len(self.ranks()) < 2
            if self._parts is not None or is_one:
                return self
            if self._whole is None:
                source = self._source
                opened: Callable[[], RowSource] = WholeSource(self).open
                if not self._is_read and isinstance(source, RunSource):
                    opened = functools.partial(RolledSource, source, Table)
                self._whole = Table(opened, parts=self)
            elif self._whole._read_new_rows():
                self._whole.version += 1
            return self._whole

    def leaders(self) -> Integers:
        """Return the row of the parts that each row of whole tensors has its name and rank from."""
        blocks = (block for block in self._source.blocks if isinstance(block, WholeBlock))
        return np.concatenate([block.leaders for block in blocks])

    def append(self, records: Iterable[Record]) -> None:
        """Append records that the source does not have; it must not grow any more."""
        more = RecordSource(lambda _: records)
        more.refresh()
        with self.lock:
            self._appended.append(more)
            self._read_new_rows()

    def _read_new_rows(self) -> bool:
        start = self._integers["step"].size
        if not self._appended:
            self._source.refresh()
            if self._source.outdated:
                self._start()
                self._source.refresh()
                start = -1
        count = sum(map(len, self._blocks())) - max(start, 0)
        for array in (*self._integers.values(), *(text.rows for text in self._texts.values())):
            array.reserve(count)
        for chunk in self.read([*self._texts, *self._integers], max(start, 0)):
            for name, text in self._texts.items():
                text.extend(chunk.column(name))
            for name, column in self._integers.items():
                column.extend(numbers(chunk.column(name)))
        self._publish()
        return len(self) > start

    def shard_keys(self) -> ShardKeys:
        """Return which shards and batches the rows are of."""
        with self.lock:
            if self._keys.size < len(self):
                for chunk in self.read([*ShardKeys.columns], self._keys.size):
                    self._keys.extend(chunk)
            return self._keys

    def _series(self) -> SeriesIndex:
        self._index.update(self.kind, self.name)
        return self._index

    # -- columns -------------------------------------------------------------------------

    @property
    def is_clipped(self) -> bool:
        """Return whether two columns count the exponents outside of a range."""
        return self._source.clipped

    def statistics(self) -> list[str]:
        """Return the numeric columns: ``rm2``, ``max_abs`` …, and ``nonfinite``, a count."""
        available = self._source.statistics
        counted = set(NONFINITE_COUNTS) <= set(available)
        return [*available, NONFINITE] if counted else available

    def has(self, statistic: str) -> bool:
        """Return whether there is such a column."""
        return statistic in self.statistics()

    def column(self, statistic: str) -> Floats:
        """Return a statistic of every row; NaN where a record has none."""
        if statistic == NONFINITE:
            counts = [np.nan_to_num(self.column(name)) for name in NONFINITE_COUNTS]
            return counts[0] + counts[1] + counts[2]
        return self.values_at(statistic)

    def _statistic(self, statistic: str) -> GrowingArray:
        is_flag = statistic == HAS_NUMBER
        if statistic not in self._statistics:
            if not is_flag and not self.has(statistic):
                raise NotFound(no_such("statistic", statistic, self.statistics()))
            self._statistics[statistic] = GrowingArray(np.bool_ if is_flag else np.float64)
        column = self._statistics[statistic]
        if column.size < len(self):
            name = "number" if statistic in (VALUE, HAS_NUMBER) else statistic
            for chunk in self.read([name], column.size):
                cells = chunk.column(name)
                column.extend(is_valid(cells) if is_flag else numbers(cells))
        return column

    def fill(self, rows: Integers, summaries: Sequence[Summary]) -> None:
        """Set the statistics of rows that were recorded without any."""
        with self.lock:
            for name in STATISTICS:
                found = [getattr(each, name) for each in summaries]
                self._statistic(name).values[rows] = found

    def prefetch(self, statistics: Iterable[str]) -> None:
        """Read statistics together: every pass opens the files of all ranks."""
        with self.lock:
            missing = [n for n in statistics if n in STATISTICS and n not in self._statistics]
            if len(missing) < 2 or not set(missing) <= set(self._source.statistics):
                return
            found = {name: GrowingArray(np.float64) for name in missing}
            for chunk in self.read(missing):
                for name, column in found.items():
                    column.extend(numbers(chunk.column(name)))
            self._statistics |= found

    def contents(self) -> NDArray[np.uint64]:
        """Return 64 bits of each row that differ if any of its statistics does."""
        with self.lock:
            names = [name for name in STATISTICS if name in self._source.statistics]
            for chunk in self.read(names, self._contents.size):
                columns = [numbers(chunk.column(name)) for name in names]
                self._contents.extend(mixed(columns, chunk.num_rows))
            return self._contents.values[: len(self)]

    def digests(self) -> NDArray[np.uint64]:
        """Return 64 bits of the digest that `track(digests=True)` gave each row; 0 without one."""
        with self.lock:
            for chunk in self.read(["digest"], self._digests.size):
                self._digests.extend(digest_bits(chunk.column("digest")))
            return self._digests.values[: len(self)]

    def nonfinite(self, rows: Integers) -> Integers:
        """Return how many values of each of `rows` were NaN or infinite; 0 where unknown."""
        total = np.zeros(len(rows), np.int64)
        for name in NONFINITE_COUNTS if self.has(NONFINITE) else ():
            counts = self.column(name)[rows]
            bad = np.flatnonzero(counts > 0)  # mostly none
            total[bad] += counts[bad].astype(np.int64)
        return total

    def is_known(self, statistic: str, rows: Integers) -> NDArray[np.bool_]:
        """Return for which of `rows` a statistic is known, even if it is NaN."""
        self.prefetch((statistic, *NONFINITE_COUNTS))
        if not self.has(NONFINITE):
            return np.ones(len(rows), np.bool_)  # without counts, NaN has only one meaning
        known = ~np.isnan(self.column(statistic)[rows])
        rest = np.flatnonzero(~known)
        known[rest] = self.nonfinite(rows[rest]) > 0
        return known | self.has_number(rows) if statistic == VALUE else known

    def has_number(self, rows: Integers) -> NDArray[np.bool_]:
        """Return which of `rows` are single numbers, NaN included."""
        return self.column(HAS_NUMBER)[rows] > 0

    def read(self, columns: list[str], start: int = 0) -> Iterator[pa.Table]:
        """Yield columns of the run format, of all rows from `start` on, chunk by chunk."""
        return read_blocks(self._blocks(), columns, start)

    def _blocks(self) -> list[RowBlock]:
        return [*self._source.blocks, *self._appended]

    def slices(self, rows: Integers, most: int) -> Iterator[slice]:
        """Yield slices of about `most` ascending rows; a block of the source is in one of them."""
        start = 0
        edges = np.searchsorted(rows, np.cumsum([0, *map(len, self._blocks())]))
        for edge, after in zip(edges, [*edges[1:], len(rows) + most + 1], strict=True):
            if after - start > most and edge > start:
                yield slice(start, edge)
                start = edge

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        """Return columns of the run format, of the given rows in the given order."""
        order = np.argsort(rows, kind="stable")
        taken = take_rows(self._blocks(), rows[order], columns)
        if (order[1:] > order[:-1]).all():
            return taken
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        return taken.take(row_indices(back))

    # -- rows ----------------------------------------------------------------------------

    def rows(
        self,
        *,
        kind: str,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        step: int | None = None,
    ) -> Integers:
        """Return the matching rows of a kind, by name, then as in `series`."""
        chosen = self.layers(kind) if names is None else names
        parts = [self.series(kind, name, rank) for name in chosen]
        rows = np.concatenate([np.empty(0, np.int64), *parts])
        return rows if step is None else rows[self.step[rows] == step]

    def series(
        self, kind: str, name: str, rank: int | None = None, *, ordered: bool = True
    ) -> Integers:
        """Return the rows of one name and kind by step, then rank, then order of capture.

        Unless `ordered`, they come as they are: those of each rank in the order of capture.
        """
        with self.lock:
            series = self._series()
            rows = series.rows(self._texts["kind"].code(kind), self._texts["name"].code(name))
        if rank is not None:
            rows = rows[self.rank[rows] == rank]
        if not ordered:
            return rows
        step, ranks, seq = self.step[rows], self.rank[rows], self.values_at("seq", rows)
        apart = np.diff(ranks)
        if ((apart > 0) | ((apart == 0) & (np.diff(seq) >= 0))).all():  # they came rank by rank
            return rows[np.argsort(step, kind="stable")]
        return rows[np.lexsort((seq, ranks, step))]

    def layers(self, kind: str | None = None) -> list[str]:
        """Return the names of a kind, or all but metrics, in order of first appearance."""
        if not self._is_read:
            return self.whole().layers(kind)
        with self.lock:
            if kind is None:
                excluded = {self._texts["kind"].code(each) for each in _NOT_LAYERS}
                codes = {name for each, name in self._series() if each not in excluded}
            else:
                wanted = self._texts["kind"].code(kind)
                codes = {name for each, name in self._series() if each == wanted}
        return [self.names[code] for code in sorted(codes)]

    def tensor_kinds(self) -> list[str]:
        """Return the kinds that describe tensors, in the order of the LogFrame schema."""
        return [kind.value for kind in KINDS if kind.value in self.index().kinds]

    def ranks(self) -> list[int]:
        """Return the ranks."""
        if not self._is_read and isinstance(self._source, RunSource):
            return self._source.reader.ranks
        return [int(rank) for rank in np.unique(self.rank)]

    def steps(self, kind: str | None = None, name: str | None = None) -> Integers:
        """Return the steps, of all rows or of a kind or of one of its names."""
        if not self._is_read:
            return self.whole().steps(kind, name)
        if kind is not None and name is not None:
            return np.unique(self.step[self.series(kind, name)])
        if kind is None:
            return np.unique(self.step)
        return np.unique(self.step[self.kind == self._texts["kind"].code(kind)])

    def metrics(self, rank: int | None = None) -> dict[str, tuple[Integers, Floats]]:
        """Return name → steps and values of metrics, such as those of ``tracker.step(loss=…)``.

        There is one value per step: that of the rank, or the mean of the ranks that reported one.
        """
        if not self._is_read:
            return self.whole().metrics(rank)
        kind = Kind.METRIC.value
        series = {name: self.series(kind, name, rank) for name in self.layers(kind)}
        return {
            name: mean_per_step(self.step[rows], self.rank[rows], self.column(VALUE)[rows])
            for name, rows in series.items() if len(rows)
        }  # fmt: skip

    def alerts(self, severity: str = "alert") -> list[Alert]:
        """Return the alerts, or the hints, in order of capture.

        If there are more than 10,000, the earliest ones, and an alert that counts the others.
        """
        if not self._is_read:
            return self.whole().alerts(severity)
        with self.lock:
            code = self._texts["kind"].code(Kind.ALERT.value)
            return self._alerts.get(self, np.flatnonzero(self.kind == code), severity)


def locked(
    function: Callable[Concatenate[Table, Parameters], Result],
) -> Callable[Concatenate[Table, Parameters], Result]:
    """Decorate a function of a table to hold its lock: no other thread refreshes it meanwhile."""

    @functools.wraps(function)
    def wrapper(table: Table, /, *args: Parameters.args, **options: Parameters.kwargs) -> Result:
        with table.lock:
            return function(table, *args, **options)

    return wrapper


def table_of(origin: Any) -> Table:
    """Return the table of a run, a live session, a tracker, a LogFrame; a table is returned as is.

    >>> table = table_of([Record("loss", Kind.METRIC, 3, 0, 0, 0, 1, 0, value=0.5)])
    >>> table.metrics()
    {'loss': (array([3]), array([0.5]))}
    """
    if isinstance(origin, Table):
        return origin
    return Table(source_of(RunReader(origin) if isinstance(origin, (str, Path)) else origin))
