"""Records that have arrived at a worker and wait to be processed."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection

from tensortap.history import History, Key, record_nbytes
from tensortap.record import Record


class Inbox(History):
    """A history from which records are taken in the order of their arrival.

    A worker may be slower than its program. At most `per_name` records of a name wait, and at most
    `bound` bytes in all; beyond that the oldest record of the name, or of the most frequent name,
    is dropped.
    """

    def __init__(self, bound: int, per_name: int) -> None:
        super().__init__(bound)
        self.dropped = 0
        self._per_name = per_name
        self._woken = False
        self._arrivals = itertools.count()
        self._waiting: collections.OrderedDict[int, Record] = collections.OrderedDict()
        self._by_key: dict[Key, collections.deque[int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def write(self, records: Collection[Record]) -> None:
        """Add records; drop others if too many wait."""
        with self._changed:
            for record in records:
                key = (record.name, record.kind, record.rank)
                arrivals = self._by_key.setdefault(key, collections.deque())
                number = next(self._arrivals)
                self._waiting[number] = record
                arrivals.append(number)
                self.nbytes += record_nbytes(record)
                if len(arrivals) > self._per_name:
                    self._drop_oldest(arrivals)
                while self.nbytes > self.bound and len(self._waiting) > 1:
                    self._drop_oldest(max(self._by_key.values(), key=len))
            self.written += len(records)
            self._changed.notify_all()

    def _drop_oldest(self, arrivals: collections.deque[int]) -> None:
        self.nbytes -= record_nbytes(self._waiting.pop(arrivals.popleft()))
        self.dropped += 1

    def take(self, timeout: float) -> Record | None:
        """Return the record that has waited longest; None after `timeout` seconds or a `wake`."""
        with self._changed:
            if not self._waiting and not self._woken:
                self._changed.wait(timeout)
            if not self._waiting:
                self._woken = False
                return None
            _, record = self._waiting.popitem(last=False)
            self._by_key[record.name, record.kind, record.rank].popleft()
            self.nbytes -= record_nbytes(record)
            return record

    def wake(self) -> None:
        """Make a waiting `take` return."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()
