"""The sources of a table's rows: a run, records in memory; a room adds the LogFrame.

A source keeps its rows in blocks, in the order in which it first reported them. A block hands out
columns of its rows as Arrow tables with the columns of the run format. Dropped records are no rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from tensortap.core.record import Kind, Record, TensorData
from tensortap.core.rooms import offer
from tensortap.runs.arrow import column as arrow_column
from tensortap.runs.arrow import numbers, row_indices
from tensortap.runs.rows import COLUMNS, STATISTICS, number_of, row_of, schema
from tensortap.runs.run_reader import RunReader
from tensortap.runs.tables import RankTables
from tensortap.runs.windows import WindowBlock, covering, is_loose
from tensortap.table.columns import VALUE

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

ALL_STATISTICS = [*STATISTICS, VALUE]


class RowBlock(Protocol):
    """Adjacent rows of a table, column by column."""

    def __len__(self) -> int: ...

    def read(self, columns: list[str], start: int) -> pa.Table:
        """Return columns of all rows from `start` on."""
        ...

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        """Return columns of the given rows, whose numbers must ascend."""
        ...


class RowSource(Protocol):
    """The blocks of a table; new rows come after all others."""

    blocks: Sequence[RowBlock]
    names: Sequence[str]  # those of which the order of first appearance is known
    statistics: list[str]  # the names of the numeric columns
    is_large: bool  # whether rows are not read before something needs them: it is a `RunSource`
    bounded: bool  # whether old rows are evicted: a table then starts over from time to time
    clipped: bool  # whether exponents outside a range were counted in two columns, below and above
    outdated: bool  # whether reported rows are no longer right: the table starts over

    def refresh(self) -> None:
        """Look for new rows."""
        ...


def read_blocks(
    blocks: Sequence[RowBlock], columns: list[str], start: int = 0
) -> Iterator[pa.Table]:
    """Yield columns of all rows from `start` on, block by block."""
    for block in blocks:
        if start < len(block):
            yield block.read(columns, start)
        start = max(0, start - len(block))


def take_rows(blocks: Sequence[RowBlock], rows: Integers, columns: list[str]) -> pa.Table:
    """Return columns of ascending rows, which may lie in several blocks."""
    import pyarrow as pa

    ends = np.cumsum([0, *map(len, blocks)])
    edges = np.searchsorted(rows, ends)  # where the rows of each block begin
    tables = []
    readable = not {"name", "kind", "dtype"} & set(columns)  # which `read` returns as codes
    for i in np.flatnonzero(np.diff(edges)).tolist():
        own, block = rows[edges[i] : edges[i + 1]] - ends[i], blocks[i]
        is_whole = readable and len(own) == len(block) and bool((np.diff(own) == 1).all())
        tables.append(block.read(columns, 0) if is_whole else block.take(own, columns))
    if not tables:
        return arrow_table([c for c in columns if c in COLUMNS], [], [])
    return pa.concat_tables(table.replace_schema_metadata(None) for table in tables)


# -- a run ---------------------------------------------------------------------------------


class RunSource:
    """The rows of a run, finished or still being written.

    A row keeps its address (rank, part, number in the part) when the tail of a rank is sealed: the
    sealed part holds the same rows in the same order. Of a compacted run, windows come first, then
    loose rows.
    """

    statistics = ALL_STATISTICS
    bounded = clipped = outdated = False

    def __init__(self, reader: RunReader, blocks: Sequence[RowBlock] | None = None) -> None:
        """Read a run; `blocks`, if given, stand for the rows of its windows."""
        self.reader = reader
        self.windows = reader.windows
        self.is_large = bool(self.windows) and blocks is None
        self._refreshes = blocks is None  # others follow a table that does
        self.blocks: Sequence[RowBlock] = blocks or []
        known = covering(self.windows)
        self.names: Sequence[str] = reader.names() if self.windows else []  # windows are sorted
        # rank → part and row to read next
        self._next = {rank: (part, 0) for rank, part in (known.covered if known else {}).items()}
        self._started = False
        self._sealed: tuple[Any, Any] = (None, None)  # the columns of a part that were read last

    def _window_blocks(self, near: Collection[tuple[str, str]] | None = None) -> list[RowBlock]:
        return [
            WindowBlock(window.records, group)
            for window in self.windows
            for group in window.records.groups(near)
        ]

    def near(self, series: Collection[tuple[str, str]]) -> RunSource:
        """Return all rows of some kinds and names, and few others."""
        return RunSource(self.reader, self._window_blocks(series))

    def loose(self, late: Integers) -> RunSource:
        """Return the rows that are in no window, and those of windows at the steps `late`."""
        blocks: list[RowBlock] = []
        for window in self.windows if len(late) else ():
            for group in window.records.groups() if window.has(late).any() else ():
                step = numbers(window.records.read(group, ["step"]).column("step"))
                kept = np.flatnonzero(np.isin(step, late))
                blocks += [WindowBlock(window.records, group, kept)] if len(kept) else []
        return RunSource(self.reader, blocks)

    def refresh(self) -> None:
        if self._started and self._refreshes:
            self.reader.refresh()
        elif not self._started and self.is_large:
            self.blocks = self._window_blocks()
        self._started = True
        with self.reader.lock:
            new = [self._new_blocks(*each) for each in self.reader.by_rank.items()]
            self.blocks = [*self.blocks, *itertools.chain.from_iterable(new)]

    def _new_blocks(self, rank: int, tables: RankTables) -> Iterator[_RunBlock]:
        first, start = self._next.get(rank, (0, 0))
        for part in range(first, tables.count):
            is_sealed, size = part < tables.sealed, tables.size(part)
            if size > start:
                kept = self._kept(tables, part, start)
                yield _RunBlock(self, rank, part, slice(start, size), kept)
            start = 0 if is_sealed else size
            self._next[rank] = part + is_sealed, start

    def _kept(self, tables: RankTables, part: int, start: int) -> Integers | None:
        """Return the rows from `start` on that are loose and hold a record; None: all."""
        rank, is_sealed = tables.rank, part < tables.sealed
        is_read = any(part < window.manifest.parts.get(rank, 0) for window in self.windows)
        if is_sealed and not is_read and not tables.part(part).contents.missing:
            return None
        cells = tables.read_part(part, ["step", "missing"]).slice(start)
        kept = false_rows(cells.column("missing"))
        loose = is_loose(self.windows, rank, part, numbers(cells.column("step")))
        if loose.all():
            return kept
        return np.flatnonzero(loose) if kept is None else kept[loose[kept]]

    def read_part(self, rank: int, part: int, columns: list[str]) -> pa.Table:
        """Return columns of a part, which may have several blocks."""
        key = rank, part, columns
        with self.reader.lock:
            tables = self.reader.by_rank[rank]
            if part >= tables.sealed:
                return tables.read_part(part, columns)
            if self._sealed[0] != key:
                self._sealed = key, tables.read_part(part, columns, encode_words=True)
            return self._sealed[1]


class _RunBlock:
    """Adjacent rows of one part of one rank; `kept` are those that hold a record, None: all."""

    def __init__(
        self, source: RunSource, rank: int, part: int, rows: slice, kept: Integers | None
    ) -> None:
        self._source = source
        self._part = rank, part
        self._rows = rows
        self._kept = kept

    def __len__(self) -> int:
        return self._rows.stop - self._rows.start if self._kept is None else len(self._kept)

    def read(self, columns: list[str], start: int) -> pa.Table:
        rows = self._source.read_part(*self._part, columns)[self._rows]
        return (rows if self._kept is None else rows.take(row_indices(self._kept))).slice(start)

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        rank, part = self._part
        within = rows if self._kept is None else self._kept[rows]
        reader = self._source.reader
        with reader.lock:
            return reader.by_rank[rank].take(part, self._rows.start + within, columns)


def false_rows(mask: pa.ChunkedArray) -> Integers | None:
    """Return the positions of the false values, or None if all are."""
    import pyarrow.compute as pc

    if not pc.any(mask).as_py():
        return None
    return numbers(pc.indices_nonzero(pc.invert(mask.combine_chunks())).cast("int64"))


# -- records in memory -----------------------------------------------------------------------


class RecordSource:
    """Records in memory: a list, a tracker, a live session.

    `new_records` gets the number of records so far and returns those that came since. Without
    `values` only alerts keep their value, so that the table does not hold payloads that a history
    has evicted.
    """

    statistics = ALL_STATISTICS
    clipped = outdated = is_large = False
    names: Sequence[str] = ()

    def __init__(
        self,
        new_records: Callable[[int], Iterable[Record]],
        *,
        bounded: bool = False,
        values: bool = True,
    ) -> None:
        self.bounded = bounded
        self.blocks: Sequence[RowBlock] = (self,)
        self._new_records = new_records
        self._values = values
        self._records: list[Record] = []
        self._numbers: list[float | None] = []

    def refresh(self) -> None:
        for record in self._new_records(len(self._records)):
            if not isinstance(record, Record):
                raise TypeError(f"expected records, got {record!r:.80}")
            self._numbers.append(number_of(record.value))
            if not self._values and record.value is not None and record.kind is not Kind.ALERT:
                record = msgspec.structs.replace(record, value=None)
            self._records.append(record)

    def __len__(self) -> int:
        return len(self._records)

    def read(self, columns: list[str], start: int) -> pa.Table:
        return arrow_table(columns, self._records[start:], self._numbers[start:])

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        chosen = rows.tolist()
        records = [self._records[row] for row in chosen]
        return arrow_table(columns, records, [self._numbers[row] for row in chosen])


_PLAIN = frozenset(Record.__struct_fields__) - {"kind", "shard", "value", "stats", "tags"}
_SUMMARY = frozenset((*STATISTICS, "first_bin", "bins"))
_encode = msgspec.msgpack.Encoder(enc_hook=lambda _: None).encode  # without large payloads


def arrow_table(columns: list[str], records: list[Record], numbers: list[float | None]) -> pa.Table:
    """Return columns of the run format of records; `numbers` are their values, where they are."""
    import pyarrow as pa

    fields = [schema().field(name) for name in columns]
    arrays = [arrow_column(_cells(f.name, records, numbers), f.type) for f in fields]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _cells(column: str, records: list[Record], numbers: list[float | None]) -> list[Any]:
    if column == "number":
        return numbers
    if column in _PLAIN:
        return [getattr(record, column) for record in records]
    if column in _SUMMARY:
        summaries = [record.stats for record in records]
        return [None if each is None else getattr(each, column) for each in summaries]
    if column == "kind":
        return [record.kind.value for record in records]
    if column == "value":
        values = [record.value for record in records]
        return [None if v is None or isinstance(v, TensorData) else _encode(v) for v in values]
    place = COLUMNS.index(column)
    return [row_of(record, None, [])[place] for record in records]


# -- any origin ------------------------------------------------------------------------------


def source_of(origin: Any) -> Callable[[], RowSource]:
    """Return what opens the rows of `origin`.

    `origin` is a run or its reader, a live session (its server, its history, a view of one in
    another process), a tracker, an iterable of records, or a LogFrame.
    """
    # a run and a view of a live session have a reader, a server has a history
    origin = getattr(origin, "reader", None) or getattr(origin, "history", None) or origin
    if isinstance(origin, RunReader):
        return lambda: RunSource(origin)
    since = getattr(origin, "since", None)
    if since is not None:
        return lambda: RecordSource(_following(since), bounded=True, values=False)
    if hasattr(origin, "columns") and hasattr(origin, "attrs"):
        return lambda: offer("table.frame rows")(origin)

    def unseen(count: int) -> Iterable[Record]:
        return itertools.islice(getattr(origin, "records", origin), count, None)

    several = isinstance(origin, Iterable) and not isinstance(origin, (str, bytes, Mapping))
    if not several and not hasattr(type(origin), "records"):
        raise TypeError(
            "expected a run (tap.open), a live session (tap.serve), a tracker or a LogFrame, "
            f"got {type(origin).__name__}"
        )
    return lambda: RecordSource(unseen)


def _following(
    since: Callable[[int], tuple[int, list[Record]]],
) -> Callable[[int], Iterable[Record]]:
    """Return what yields the records that a live session received since the last call."""
    cursor = 0

    def new_records(_: int) -> Iterable[Record]:
        nonlocal cursor
        before = -1
        while cursor != before:
            before = cursor
            cursor, records = since(before)
            yield from records

    return new_records
