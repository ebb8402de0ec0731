"""Where the rows of a table come from: a run, records in memory, a LogFrame.

A source numbers its rows in the order in which it first reported them, and hands out columns of
them as Arrow tables with the columns of the run format. Dropped records are no rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from tensortap.record import Kind, Record, TensorData
from tensortap.runs.arrow import column as arrow_column
from tensortap.runs.rows import COLUMNS, STATISTICS, number_of, row_of, schema

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

VALUE = "value"
"""The statistic of records that are single numbers; the column ``number`` of the run format."""


class RowSource(Protocol):
    """Hands out rows of records, column by column."""

    bounded: bool  # whether old rows are evicted: a table then starts over from time to time
    clipped: bool  # whether exponents outside a range were counted in two columns, below and above

    def statistics(self) -> list[str]:
        """Return the names of the numeric columns that may be read."""
        ...

    def refresh(self) -> int:
        """Look for new rows; return the number of all rows."""
        ...

    def read(self, columns: list[str], start: int = 0) -> Iterator[pa.Table]:
        """Yield columns of all rows from `start` on, chunk by chunk."""
        ...

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        """Return columns of the given rows, whose numbers must ascend."""
        ...


class RecordSource:
    """Records in memory: a list, a tracker, a live session.

    `new_records` returns the records that came since it was last called. Without `values` only
    alerts keep their value, so that the table does not hold payloads that a history has evicted.
    """

    clipped = False

    def __init__(
        self,
        new_records: Callable[[], Iterable[Record]],
        *,
        bounded: bool = False,
        values: bool = True,
    ) -> None:
        self.bounded = bounded
        self._new_records = new_records
        self._values = values
        self._records: list[Record] = []
        self._numbers: list[float | None] = []

    def statistics(self) -> list[str]:
        return [*STATISTICS, VALUE]

    def refresh(self) -> int:
        for record in self._new_records():
            self._numbers.append(number_of(record.value))
            if not self._values and record.value is not None and record.kind is not Kind.ALERT:
                record = msgspec.structs.replace(record, value=None)
            self._records.append(record)
        return len(self._records)

    def read(self, columns: list[str], start: int = 0) -> Iterator[pa.Table]:
        yield _arrow_table(columns, self._records[start:], self._numbers[start:])

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        chosen = rows.tolist()
        records = [self._records[row] for row in chosen]
        return _arrow_table(columns, records, [self._numbers[row] for row in chosen])


_PLAIN = frozenset(Record.__struct_fields__) - {"kind", "shard", "value", "stats", "tags"}
_SUMMARY = frozenset((*STATISTICS, "first_bin", "bins"))
_encode = msgspec.msgpack.Encoder(enc_hook=lambda _: None).encode  # without large payloads


def _arrow_table(
    columns: list[str], records: list[Record], numbers: list[float | None]
) -> pa.Table:
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


class ChainedSource:
    """The rows of one source, then those of another; neither grows any more."""

    bounded = False
    clipped = False

    def __init__(self, first: RowSource, second: RowSource) -> None:
        self._both = first, second
        self._sizes = first.refresh(), second.refresh()

    def statistics(self) -> list[str]:
        return self._both[0].statistics()

    def refresh(self) -> int:
        return sum(self._sizes)

    def read(self, columns: list[str], start: int = 0) -> Iterator[pa.Table]:
        size = self._sizes[0]
        if start < size:
            yield from self._both[0].read(columns, start)
        yield from self._both[1].read(columns, max(0, start - size))

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        import pyarrow as pa

        size = self._sizes[0]
        parts = rows[rows < size], rows[rows >= size] - size
        tables = [
            source.take(part, columns) for source, part in zip(self._both, parts, strict=True)
        ]
        return pa.concat_tables(table.replace_schema_metadata(None) for table in tables)


class FrameSource:
    """The rows of a LogFrame, as it is now."""

    bounded = False
    clipped = True

    def __init__(self, frame: Any) -> None:
        from tensortap.table.logframe_schema import validate_logframe

        self._frame = validate_logframe(frame)

    def statistics(self) -> list[str]:
        return [str(name) for name in self._frame["scalar_stats"].columns]

    def refresh(self) -> int:
        return len(self._frame)

    def read(self, columns: list[str], start: int = 0) -> Iterator[pa.Table]:
        yield self.take(np.arange(start, len(self._frame)), columns)

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        import pyarrow as pa

        return pa.table({name: self._column(name, rows) for name in columns})

    def _column(self, name: str, rows: Integers) -> Any:
        import pyarrow as pa

        metadata = self._frame["metadata"]
        if name in ("step", "rank", "call", "dtype"):
            return metadata[name].to_numpy()[rows] if name in metadata else np.zeros_like(rows)
        if name == "seq":
            return rows
        if name in ("name", "kind"):
            return self._names_or_kinds(name, rows)
        if name in ("first_bin", "bins", "below", "above"):
            return self._exponents(name, rows)
        if name in ("number", "value", "tags"):  # it has statistics, no values and no tags
            return pa.nulls(len(rows), schema().field(name).type)
        statistics = self._frame["scalar_stats"]
        return statistics[{str(c): c for c in statistics.columns}[name]].to_numpy(np.float64)[rows]

    def _names_or_kinds(self, column: str, rows: Integers) -> list[str]:
        """Split ``Optimiser_State.exp_avg`` into the kind and a suffix of the name."""
        metadata = self._frame["metadata"].iloc[rows]
        parts = [text.partition(".")[::2] for text in metadata["tensor_type"]]
        if column == "kind":
            return [kind for kind, _ in parts]
        return [
            f"{name}.{state}" if state else name
            for name, (_, state) in zip(metadata["name"], parts, strict=True)
        ]

    def _exponents(self, column: str, rows: Integers) -> Any:
        import pyarrow as pa

        counts, statistics = self._frame["exponent_counts"], self._frame["scalar_stats"]
        if column == "below":
            return counts[-np.inf].to_numpy(np.int64)[rows]
        if column == "above":
            above = counts[np.inf].to_numpy(np.int64)[rows]
            # infinities are counted here, and also as what they are
            for name in ("posinfs", "neginfs"):
                if name in statistics:
                    above = above - statistics[name].to_numpy()[rows].astype(np.int64)
            return above
        labels = [label for label in counts.columns if isinstance(label, int)]
        low, width = min(labels), max(labels) - min(labels) + 1
        if column == "first_bin":
            return np.full(len(rows), low)
        dense = np.zeros((len(rows), width), np.int64)
        for label in labels:
            dense[:, label - low] = counts[label].to_numpy(np.int64)[rows]
        offsets = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(width)
        return pa.ListArray.from_arrays(offsets, dense.ravel())


def source_of(origin: Any) -> Callable[[], RowSource]:
    """Return what opens the rows of `origin`.

    `origin` is a run or its reader, a live session (its server, its history, a view of one in
    another process), a tracker, an iterable of records, or a LogFrame.
    """
    from tensortap.readers.run import RunReader
    from tensortap.table.run_source import RunSource

    # a run and a view of a live session have a reader, a server has a history
    origin = getattr(origin, "reader", None) or getattr(origin, "history", None) or origin
    if isinstance(origin, RunReader):
        return lambda: RunSource(origin)
    since = getattr(origin, "since", None)
    if since is not None:
        return lambda: RecordSource(_Follower(since), bounded=True, values=False)
    if hasattr(origin, "columns") and hasattr(origin, "attrs"):
        return lambda: FrameSource(origin)
    records = getattr(origin, "records", origin)
    if not isinstance(records, Iterable) or isinstance(records, (str, bytes)):
        raise TypeError(
            "expected a run (tap.open), a live session (tap.serve), a tracker or a LogFrame, "
            f"got {type(origin).__name__}"
        )
    return lambda: RecordSource(_Unseen(origin))


class _Follower:
    """Returns the records that a live session received since the last call."""

    def __init__(self, since: Callable[[int], tuple[int, list[Record]]]) -> None:
        self._since = since
        self._cursor = 0

    def __call__(self) -> Iterable[Record]:
        while True:
            before = self._cursor
            self._cursor, records = self._since(before)
            yield from records
            if self._cursor == before:
                return


class _Unseen:
    """Iterates over all records again and returns those that it has not returned before."""

    def __init__(self, origin: Any) -> None:
        self._origin = origin
        self._count = 0

    def __call__(self) -> Iterable[Record]:
        records = getattr(self._origin, "records", self._origin)
        for record in itertools.islice(records, self._count, None):
            self._count += 1
            yield record
