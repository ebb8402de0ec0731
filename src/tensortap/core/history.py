"""A bounded history of records in memory: one series per name, kind and rank."""

from __future__ import annotations

import collections
import heapq
import itertools
import threading
from bisect import bisect_left
from collections.abc import Collection, Iterable

from tensortap.core.columns import ROW_NBYTES, Columns
from tensortap.core.record import Blob, Kind, Number, Opaque, Record, TensorData, Value
from tensortap.core.values import CONTAINERS, children

OVERHEAD = 512
"""Bytes that the record of a number takes: measured, rounded up."""

_DTYPE_OVERHEAD = 160  # type, dtype and shape of a tensor
_TENSOR_OVERHEAD = 256
_PAYLOAD_OVERHEAD = 2048  # bytes: half a page, and the objects that hold the memory
_STATS_OVERHEAD = 512  # without the bins
_SHARD_OVERHEAD = 448
_NODE_OVERHEAD = 64  # for each node inside a container
_ROW_OVERHEAD = ROW_NBYTES + 8  # of a record in a column, with its position
_COLUMN_OVERHEAD = 1024  # objects of a column
_FEW = 16  # fewer records of a column are kept one by one

Key = tuple[str, Kind, int]


def payload_nbytes(value: Value) -> int:
    """Return the bytes of all tensors, strings and bytes in a value."""
    if type(value) is TensorData:
        data = value.data
        return len(data) if type(data) is bytes else int(data.nbytes)
    if type(value) is float or value is None:
        return 0
    if isinstance(value, str):
        return _text_nbytes(value)
    if isinstance(value, Blob):
        return len(value.data)
    if isinstance(value, Number):
        return len(value.text)
    if isinstance(value, Opaque):
        return _text_nbytes(value.repr)
    return sum([_NODE_OVERHEAD + payload_nbytes(child) for child in children(value)])


def _text_nbytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def record_nbytes(record: Record, payload: int | None = None) -> int:
    """Return the memory that a record takes; pass the size of its payload if known.

    The sizes of Python objects are measured: a test compares the sum with the memory of a process.
    """
    value, stats = record.value, record.stats
    nbytes = payload_nbytes(value) if payload is None else payload
    nbytes += OVERHEAD + len(record.name) + (_DTYPE_OVERHEAD if record.dtype else 0)
    if type(value) is TensorData:
        nbytes += _TENSOR_OVERHEAD
        if type(value.data) is not bytes:
            nbytes += _PAYLOAD_OVERHEAD
    elif isinstance(value, CONTAINERS):
        nbytes += _tree_overhead(value)
    if stats is not None:
        bins = stats.bins
        # Python shares small integers
        nbytes += _STATS_OVERHEAD + 8 * len(bins) + 32 * sum([n > 256 for n in bins])
    if record.shard is not None:
        nbytes += _SHARD_OVERHEAD
    if record.tags:
        nbytes += sum([OVERHEAD // 4 + len(key) + len(tag) for key, tag in record.tags.items()])
    return nbytes


def _tree_overhead(value: Value) -> int:
    """Return the memory of the objects inside a container, besides what its payload counts."""
    if type(value) is TensorData:
        return _TENSOR_OVERHEAD
    return sum([_NODE_OVERHEAD // 4 + _tree_overhead(child) for child in children(value)])


def _columns_nbytes(columns: Columns) -> int:
    """Return the memory of the records of a column, and of the objects that hold them."""
    rows = len(columns) * (columns.size + _ROW_OVERHEAD)
    return rows + _COLUMN_OVERHEAD + len(columns.column.name)


Span = Record | tuple[Columns, int, int]
"""A record, or a range of the records of a column."""


def _records_of(spans: Iterable[Span], **wanted: int) -> list[Record]:
    records: list[Record] = []
    for span in spans:
        if isinstance(span, tuple):
            records += span[0].records(*span[1:], **wanted)
        elif not wanted or all(getattr(span, field) == n for field, n in wanted.items()):
            records.append(span)
    return records


class Series:
    """The records of one name, kind and rank, in their order of arrival."""

    __slots__ = ("count", "ends", "newest_ns", "parts")

    def __init__(self) -> None:
        self.count = 0
        self.newest_ns = 0  # time of the newest record
        self.parts: collections.deque[Record | Columns] = collections.deque()
        self.ends: collections.deque[int] = collections.deque()  # position of their last record

    @property
    def oldest_ns(self) -> int:
        oldest = self.parts[0]
        return oldest.time_ns if isinstance(oldest, Record) else oldest.time_ns_of(0)

    @property
    def start(self) -> int:
        """Position of the oldest record."""
        oldest = self.parts[0]
        return self.ends[0] if isinstance(oldest, Record) else int(oldest.positions[0])

    def tail(self, length: int | None) -> list[Span]:
        """Return the newest records, at most `length`."""
        left = self.count if length is None else min(length, self.count)
        spans: list[Span] = []
        for part in reversed(self.parts):
            if left <= 0:
                break
            if isinstance(part, Record):
                spans.append(part)
                left -= 1
            else:
                first = max(0, len(part) - left)
                spans.append((part, first, len(part)))
                left -= len(part) - first
        return spans[::-1]

    def between(self, start: int, end: int) -> tuple[list[int], list[Span]]:
        """Return the records from one position to before another, and their positions."""
        positions: list[int] = []
        spans: list[Span] = []
        first = bisect_left(self.ends, start)
        for part, last in itertools.islice(zip(self.parts, self.ends, strict=True), first, None):
            if isinstance(part, Record):
                if last >= end:
                    break
                positions.append(last)
                spans.append(part)
            else:
                begin, stop = part.positions.searchsorted([start, end]).tolist()
                if begin >= stop:
                    break
                positions += part.positions[begin:stop].tolist()
                spans.append((part, begin, stop))
        return positions, spans

    def evict(self) -> int:
        """Evict the oldest record, or all of the oldest column; return their bytes."""
        part = self.parts.popleft()
        self.ends.popleft()
        self.count -= 1 if isinstance(part, Record) else len(part)
        return record_nbytes(part) if isinstance(part, Record) else _columns_nbytes(part)


class History:
    """The latest records of every name, at most `bound` bytes; one thread writes, any reads.

    When it is full it evicts the oldest records of the series that have most of them.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.nbytes = 0
        self.written = 0
        self.written_nbytes = 0
        self.evicted: collections.Counter[str] = collections.Counter()
        self._series: dict[Key, Series] = {}
        self._by_name: dict[str, list[Key]] = {}
        self._unordered: set[Key] = set()  # series whose records arrived out of order
        self._changed = threading.Condition()

    def write(self, records: Collection[Record]) -> None:
        """Add records, and evict others if they take too much memory."""
        with self._changed:
            self._write(enumerate(records, self.written))
            self.written += len(records)
            self._changed.notify_all()

    def write_columns(self, block: Iterable[Columns]) -> None:
        """Add all records of a block; their columns belong to the history from now on."""
        with self._changed:
            count = 0
            for columns in block:
                count += len(columns)
                columns.positions += self.written
                if len(columns) < _FEW:
                    records = columns.records(0, len(columns))
                    self._write(zip(columns.positions.tolist(), records, strict=True))
                else:
                    self._write_column(columns)
            self.written += count
            self._changed.notify_all()

    def _write(self, positioned: Iterable[tuple[int, Record]]) -> None:
        last = None
        for position, record in positioned:
            key = (record.name, record.kind, record.rank)
            if key != last:  # records of one name come together
                last, series = key, self._series_of(key)
                plain = OVERHEAD + len(record.name) + _DTYPE_OVERHEAD + _TENSOR_OVERHEAD
            if record.time_ns < series.newest_ns:
                self._unordered.add(key)  # sent again after newer ones
            series.newest_ns = record.time_ns
            series.parts.append(record)
            series.ends.append(position)
            series.count += 1
            value = record.value
            if type(value) is TensorData and type(value.data) is bytes:
                nbytes = len(value.data)  # the most frequent case, without a call
                more = record.stats or record.shard or record.tags or not record.dtype
                self.nbytes += record_nbytes(record, nbytes) if more else nbytes + plain
            else:
                nbytes = payload_nbytes(value)
                self.nbytes += record_nbytes(record, nbytes)
            self.written_nbytes += nbytes
            if self.nbytes > self.bound:
                self._evict(key)
                last = None  # it may have removed the series

    def _write_column(self, columns: Columns) -> None:
        column = columns.column
        key = (column.name, column.kind, column.rank)
        series = self._series_of(key)
        if columns.time_ns_of(0) < series.newest_ns or not columns.ordered:
            self._unordered.add(key)
        series.newest_ns = columns.time_ns_of(-1)
        series.parts.append(columns)
        series.ends.append(int(columns.positions[-1]))
        series.count += len(columns)
        self.nbytes += _columns_nbytes(columns)
        self.written_nbytes += len(columns) * (0 if column.is_number else columns.size)
        if self.nbytes > self.bound:
            self._evict(key)

    def _series_of(self, key: Key) -> Series:
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series()
            self._by_name.setdefault(key[0], []).append(key)
        return series

    def _evict(self, newest: Key) -> None:
        # a little more than needed, so that not every record evicts
        goal = self.bound - self.bound // 64
        longest = [
            (-series.count, series.oldest_ns, i, key)
            for i, (key, series) in enumerate(self._series.items())
            if len(series.parts) > (key == newest)
        ]
        heapq.heapify(longest)
        while self.nbytes > goal and longest:
            _, _, i, key = heapq.heappop(longest)
            series = self._series[key]
            # down to the length of the next longest series, then whichever is older; the newest
            # record is evicted last, with its column, and only if nothing else is left
            length = min(series.count - 1, -longest[0][0]) if longest else 0
            while (
                series.count > length and len(series.parts) > (key == newest) and self.nbytes > goal
            ):
                self._evict_part(key)
            if len(series.parts) > (key == newest):
                heapq.heappush(longest, (-series.count, series.oldest_ns, i, key))
        if self.nbytes > self.bound:
            self._evict_part(newest)

    def _evict_part(self, key: Key) -> None:
        series = self._series[key]
        before = series.count
        self.nbytes -= series.evict()
        self.evicted[key[0]] += before - series.count
        if not series.count:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        del self._series[key]
        self._unordered.discard(key)
        keys = self._by_name[key[0]]
        keys.remove(key)
        if not keys:
            del self._by_name[key[0]]

    def names(self) -> list[str]:
        """Return all names in the history, in the order of their first record."""
        with self._changed:
            return list(self._by_name)

    def records(
        self,
        name: str,
        *,
        step: int | None = None,
        seq: int | None = None,
        rank: int | None = None,
        kind: Kind | None = None,
        last: int | None = None,
    ) -> list[Record]:
        """Return the matching records of a name, oldest to newest.

        With `last`, only so many of the newest of each rank, if their step makes no difference.
        """
        with self._changed:
            keys = [
                key
                for key in self._by_name.get(name, ())
                if kind in (None, key[1]) and rank in (None, key[2])
            ]
            ordered = self._unordered.isdisjoint(keys)
            # `get` asks for the newest: the lock is held as briefly as possible
            length = last if ordered and step is None and seq is None else None
            spans = [span for key in keys for span in self._series[key].tail(length)]
        wanted = {field: n for field, n in (("step", step), ("seq", seq)) if n is not None}
        records = _records_of(spans, **wanted)
        if not ordered or len(keys) > 1:
            records.sort(key=lambda r: (r.time_ns, r.seq))
        return records

    def since(self, cursor: int, limit: int = 1 << 62) -> tuple[int, list[Record]]:
        """Return the next cursor and the records after this one, oldest first, at most `limit`.

        The first cursor is 0. Evicted records are not among them.
        """
        with self._changed:
            oldest = min([series.start for series in self._series.values()], default=self.written)
            cursor = max(cursor, oldest)
            end = min(self.written, cursor + limit)
            found = [series.between(cursor, end) for series in self._series.values()]
        positions = [position for part, _ in found for position in part]
        records = _records_of([span for _, part in found for span in part])
        positioned = sorted(zip(positions, records, strict=True), key=lambda each: each[0])
        return max(cursor, end), [record for _, record in positioned]

    def load(self, record: Record) -> Record:
        """Return the record itself: records in memory have their values."""
        return record

    def latest(self) -> list[tuple[int, Record]]:
        """Return the number of records and the newest record of each series."""
        return [(count, tail[-1]) for count, tail in self.tails(1)]

    def tails(self, length: int) -> list[tuple[int, list[Record]]]:
        """Return the number of records and the newest `length` records of each series."""
        with self._changed:
            tails = [(series.count, series.tail(length)) for series in self._series.values()]
        return [(count, _records_of(spans)) for count, spans in tails]

    def recent(self, count: int) -> list[Record]:
        """Return the last `count` captured records of all names, oldest to newest."""
        records = [record for _, tail in self.tails(count) for record in tail]
        return sorted(records, key=lambda r: (r.time_ns, r.seq))[-count:]

    def wait(self, count: int, timeout: float | None = None) -> bool:
        """Wait until `count` records have been written in total; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.written >= count, timeout)
