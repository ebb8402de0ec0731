"""Records in memory: one history a name and rank, oldest to newest, within a bound."""

from __future__ import annotations

import collections
import heapq
import itertools
import threading
import time
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
from tensortap.select import fits

OVERHEAD = 512  # what a record weighs besides its payload: measured, rounded up

Key = tuple[str, Kind, int]


def payload_nbytes(value: Value) -> int:
    """The bytes of all tensors, strings and the like in a value."""
    if type(value) is TensorData:
        data = value.data
        return len(data) if type(data) is bytes else int(data.nbytes)
    if type(value) is float or value is None:
        return 0
    if isinstance(value, Items):
        return sum(OVERHEAD // 8 + payload_nbytes(item) for item in value.items)
    if isinstance(value, Mapping):
        return sum(
            OVERHEAD // 4 + payload_nbytes(key) + payload_nbytes(item) for key, item in value.items
        )
    if isinstance(value, Fields):
        return sum(OVERHEAD // 8 + payload_nbytes(item) for item in value.values)
    if isinstance(value, str):
        return _text_nbytes(value)
    if isinstance(value, Blob):
        return len(value.data)
    if isinstance(value, Number):
        return len(value.text)
    return _text_nbytes(value.repr) if isinstance(value, Opaque) else 0


def _text_nbytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def weight(record: Record, payload: int | None = None) -> int:
    """What a record takes of the bound: its payload (if known already), its name, and the rest."""
    nbytes = payload_nbytes(record.value) if payload is None else payload
    nbytes += OVERHEAD + len(record.name)
    if record.tags:
        nbytes += sum([OVERHEAD // 4 + len(key) + len(tag) for key, tag in record.tags.items()])
    return nbytes


class History:
    """A bounded memory of records, written by one thread and read by any."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.nbytes = 0
        self.written = 0
        self.written_nbytes = 0
        self.evicted: collections.Counter[str] = collections.Counter()
        self._tracks: dict[Key, collections.deque[Record]] = {}
        self._numbers: dict[Key, collections.deque[int]] = {}  # in which order they came
        self._by_name: dict[str, list[Key]] = {}
        self._late: set[Key] = set()  # whose records did not come in the order of their capture
        self._changed = threading.Condition()

    def write(self, records: Collection[Record]) -> None:
        """Take records in; the oldest of the most repeated names make room for them."""
        tracks = self._tracks
        with self._changed:
            for number, record in enumerate(records, self.written):
                key = (record.name, record.kind, record.rank)
                track = tracks.get(key)
                if track is None:
                    track = tracks[key] = collections.deque()
                    self._numbers[key] = collections.deque()
                    self._by_name.setdefault(record.name, []).append(key)
                elif track and record.time_ns < track[-1].time_ns:
                    self._late.add(key)  # it was sent again, after others
                track.append(record)
                self._numbers[key].append(number)
                value = record.value
                if type(value) is TensorData and type(value.data) is bytes:
                    nbytes = len(value.data)  # by far the most
                else:
                    nbytes = payload_nbytes(value)
                self.written_nbytes += nbytes
                self.nbytes += weight(record, nbytes)
                if self.nbytes > self.bound:
                    self._evict(record)
            self.written += len(records)
            self._changed.notify_all()

    def _evict(self, newest: Record) -> None:
        """Make room, a little more than needed: so it is not looked for with every record."""
        goal = self.bound - self.bound // 64
        longest = [
            (-len(track), track[0].time_ns, i, key)
            for i, (key, track) in enumerate(self._tracks.items())
            if track[0] is not newest  # what has just come goes last, and only if it must
        ]
        heapq.heapify(longest)
        while self.nbytes > goal and longest:
            _, _, i, key = heapq.heappop(longest)
            track = self._tracks[key]
            # at once down to the length of the next, then whichever is older
            least = min(len(track) - 1, -longest[0][0]) if longest else 0
            gone = 0
            while len(track) > least and self.nbytes > goal and track[0] is not newest:
                self.nbytes -= weight(track.popleft())
                self._numbers[key].popleft()
                gone += 1
            self.evicted[key[0]] += gone
            if not track:
                self._forget(key)
            elif track[0] is not newest:
                heapq.heappush(longest, (-len(track), track[0].time_ns, i, key))
        if self.nbytes > self.bound:
            self.nbytes -= weight(newest)
            self.evicted[newest.name] += 1
            self._forget((newest.name, newest.kind, newest.rank))

    def _forget(self, key: Key) -> None:
        del self._tracks[key], self._numbers[key]
        self._late.discard(key)
        keys = self._by_name[key[0]]
        keys.remove(key)
        if not keys:
            del self._by_name[key[0]]

    def names(self) -> list[str]:
        """All names that are held, in the order in which they first came."""
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
        """All that is held under a name and fits, oldest to newest."""
        with self._changed:
            keys = list(self._by_name.get(name, ()))
            tracks = [list(self._tracks[key]) for key in keys]
            late = not self._late.isdisjoint(keys)
        found = [r for track in tracks for r in track if fits(r, step, rank, kind)]
        if late or len(tracks) > 1:
            found.sort(key=lambda r: (r.time_ns, r.seq))
        return found

    def newer(self, mark: int, most: int = 1 << 62) -> tuple[int, list[Record]]:
        """What came after a mark, oldest first, at most so many; and the mark to ask with next.

        The first mark is 0. What made room for newer ones before it was asked for is not there.

        >>> history = History(1 << 20)
        >>> history.write([Record("loss", Kind.METRIC, n, 0, n, 0, 1, n) for n in range(3)])
        >>> mark, records = history.newer(0, most=2)
        >>> mark, [r.step for r in records], [r.step for r in history.newer(mark)[1]]
        (2, [0, 1], [2])
        """
        found: list[tuple[int, Record]] = []
        with self._changed:
            oldest = min((numbers[0] for numbers in self._numbers.values()), default=self.written)
            mark = max(mark, oldest)
            end = min(self.written, mark + most)
            for key, numbers in self._numbers.items():
                if numbers[0] < end and numbers[-1] >= mark:
                    found += _between(numbers, self._tracks[key], mark, end)
        found.sort(key=lambda each: each[0])
        return max(mark, end), [record for _, record in found]

    def load(self, record: Record) -> Record:
        """The record with its value: here it has it already."""
        return record

    def latest(self) -> list[tuple[int, Record]]:
        """How many are held and the newest, for each name, kind and rank."""
        return [(held, tail[-1]) for held, tail in self.tails(1)]

    def tails(self, count: int) -> list[tuple[int, list[Record]]]:
        """How many are held and the newest so many, for each name, kind and rank."""
        with self._changed:
            tracks = self._tracks.values()
            return [(len(t), [t[i] for i in range(max(0, len(t) - count), len(t))]) for t in tracks]

    def recent(self, count: int) -> list[Record]:
        """The last records to be captured, whatever their names, oldest to newest."""
        with self._changed:
            tails = [
                track[i]
                for track in self._tracks.values()
                for i in range(max(0, len(track) - count), len(track))
            ]
        return sorted(tails, key=lambda r: (r.time_ns, r.seq))[-count:]

    def wait(self, count: int, timeout: float | None = None) -> bool:
        """Wait until `count` records have been written in all."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self.written < count:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
            return True


def _between(
    numbers: collections.deque[int], track: collections.deque[Record], mark: int, end: int
) -> list[tuple[int, Record]]:
    """Those from a mark on and before an end, looked for from the nearer side."""
    both = zip(numbers, track, strict=True)
    if mark - numbers[0] > numbers[-1] - end:
        newest = zip(reversed(numbers), reversed(track), strict=True)
        wanted = itertools.takewhile(lambda each: each[0] >= mark, newest)
        return [each for each in wanted if each[0] < end]
    wanted = itertools.takewhile(lambda each: each[0] < end, both)
    return [each for each in wanted if each[0] >= mark]
