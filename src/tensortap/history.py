"""A bounded history of records in memory: one series per name, kind and rank."""

from __future__ import annotations

import collections
import heapq
import itertools
import threading
from bisect import bisect_left
from collections.abc import Collection

from tensortap.record import (
    Blob,
    Fields,
    Items,
    Kind,
    Mapping,
    Number,
    Opaque,
    Record,
    TensorData,
    Value,
)
from tensortap.values import children

OVERHEAD = 512
"""Bytes that the record of a number takes: measured, rounded up."""

_DTYPE_OVERHEAD = 160  # type, dtype and shape of a tensor
_TENSOR_OVERHEAD = 256
_PAYLOAD_OVERHEAD = 2048  # bytes: half a page, and the objects that hold the memory
_STATS_OVERHEAD = 512  # without the bins
_SHARD_OVERHEAD = 448
_NODE_OVERHEAD = 64  # for each node inside a container

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
    elif isinstance(value, (Items, Mapping, Fields)):
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


def _tail(held: collections.deque[Record], length: int | None) -> list[Record]:
    return list(held) if length is None else list(itertools.islice(reversed(held), length))[::-1]


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
        self._series: dict[Key, collections.deque[Record]] = {}
        self._positions: dict[Key, collections.deque[int]] = {}  # order of arrival
        self._by_name: dict[str, list[Key]] = {}
        self._unordered: set[Key] = set()  # series whose records arrived out of order
        self._changed = threading.Condition()

    def write(self, records: Collection[Record]) -> None:
        """Add records, and evict others if they take too much memory."""
        last = None
        with self._changed:
            for position, record in enumerate(records, self.written):
                key = (record.name, record.kind, record.rank)
                if key != last:  # records of one name come together
                    last, held, positions = key, *self._series_of(key)
                    plain = OVERHEAD + len(record.name) + _DTYPE_OVERHEAD + _TENSOR_OVERHEAD
                if held and record.time_ns < held[-1].time_ns:
                    self._unordered.add(key)  # sent again after newer ones
                held.append(record)
                positions.append(position)
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
                    self._evict(record)
                    last = None  # it may have removed the series
            self.written += len(records)
            self._changed.notify_all()

    def _series_of(self, key: Key) -> tuple[collections.deque[Record], collections.deque[int]]:
        held = self._series.get(key)
        if held is None:
            held = self._series[key] = collections.deque()
            self._positions[key] = collections.deque()
            self._by_name.setdefault(key[0], []).append(key)
        return held, self._positions[key]

    def _evict(self, newest: Record) -> None:
        # a little more than needed, so that not every record evicts
        goal = self.bound - self.bound // 64
        longest = [
            (-len(held), held[0].time_ns, i, key)
            for i, (key, held) in enumerate(self._series.items())
            if held[0] is not newest  # evicted last, and only if nothing else is left
        ]
        heapq.heapify(longest)
        while self.nbytes > goal and longest:
            _, _, i, key = heapq.heappop(longest)
            held = self._series[key]
            # down to the length of the next longest series, then whichever is older
            length = min(len(held) - 1, -longest[0][0]) if longest else 0
            before = len(held)
            while len(held) > length and self.nbytes > goal and held[0] is not newest:
                self.nbytes -= record_nbytes(held.popleft())
                self._positions[key].popleft()
            self.evicted[key[0]] += before - len(held)
            if not held:
                self._remove(key)
            elif held[0] is not newest:
                heapq.heappush(longest, (-len(held), held[0].time_ns, i, key))
        if self.nbytes > self.bound:
            self.nbytes -= record_nbytes(newest)
            self.evicted[newest.name] += 1
            self._remove((newest.name, newest.kind, newest.rank))

    def _remove(self, key: Key) -> None:
        del self._series[key], self._positions[key]
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
            length = last if ordered and step is None else None
            series = [_tail(self._series[key], length) for key in keys]
        records = [r for held in series for r in held if step in (None, r.step)]
        if not ordered or len(series) > 1:
            records.sort(key=lambda r: (r.time_ns, r.seq))
        return records

    def since(self, cursor: int, limit: int = 1 << 62) -> tuple[int, list[Record]]:
        """Return the next cursor and the records after this one, oldest first, at most `limit`.

        The first cursor is 0. Evicted records are not among them.

        >>> history = History(1 << 20)
        >>> history.write([Record("loss", Kind.METRIC, n, 0, n, 0, 1, n) for n in range(3)])
        >>> cursor, records = history.since(0, limit=2)
        >>> cursor, [r.step for r in records], [r.step for r in history.since(cursor)[1]]
        (2, [0, 1], [2])
        """
        positioned: list[tuple[int, Record]] = []
        with self._changed:
            oldest = min((p[0] for p in self._positions.values()), default=self.written)
            cursor = max(cursor, oldest)
            end = min(self.written, cursor + limit)
            for key, positions in self._positions.items():
                part = bisect_left(positions, cursor), bisect_left(positions, end)
                records = itertools.islice(self._series[key], *part)
                positioned += zip(itertools.islice(positions, *part), records, strict=True)
        positioned.sort(key=lambda each: each[0])
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
            return [(len(held), _tail(held, length)) for held in self._series.values()]

    def recent(self, count: int) -> list[Record]:
        """Return the last `count` captured records of all names, oldest to newest."""
        records = [record for _, tail in self.tails(count) for record in tail]
        return sorted(records, key=lambda r: (r.time_ns, r.seq))[-count:]

    def wait(self, count: int, timeout: float | None = None) -> bool:
        """Wait until `count` records have been written in total; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.written >= count, timeout)
