"""What has arrived at a worker and waits to be processed."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection

from tensortap.history import History, Key, record_nbytes
from tensortap.record import Record


class Inbox(History):
    """A history that records are taken out of, in the order in which they came.

    A worker may be slower than what it is sent. Of one name at most `each` wait: the oldest of
    them makes room for the newest, and so does the oldest of the most repeated name when all
    together are more than `bound` bytes. What was replaced is counted.
    """

    def __init__(self, bound: int, each: int) -> None:
        super().__init__(bound)
        self.replaced = 0
        self._each = each
        self._woken = False
        self._arrivals = itertools.count()
        self._waiting: collections.OrderedDict[int, Record] = collections.OrderedDict()
        self._places: dict[Key, collections.deque[int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def write(self, records: Collection[Record]) -> None:
        """Take records in."""
        with self._changed:
            for record in records:
                key = (record.name, record.kind, record.rank)
                places = self._places.setdefault(key, collections.deque())
                number = next(self._arrivals)
                self._waiting[number] = record
                places.append(number)
                self.nbytes += record_nbytes(record)
                if len(places) > self._each:
                    self._replace(places)
                while self.nbytes > self.bound and len(self._waiting) > 1:
                    self._replace(max(self._places.values(), key=len))
            self.written += len(records)
            self._changed.notify_all()

    def _replace(self, places: collections.deque[int]) -> None:
        self.nbytes -= record_nbytes(self._waiting.pop(places.popleft()))
        self.replaced += 1

    def take(self, timeout: float) -> Record | None:
        """The record that has waited longest; None when none comes before the time or a `wake`."""
        with self._changed:
            if not self._waiting and not self._woken:
                self._changed.wait(timeout)
            if not self._waiting:
                self._woken = False
                return None
            _, record = self._waiting.popitem(last=False)
            self._places[record.name, record.kind, record.rank].popleft()
            self.nbytes -= record_nbytes(record)
            return record

    def wake(self) -> None:
        """Let whoever waits for a record look around."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()
