"""The sink that keeps records in this process."""

from __future__ import annotations

import collections

from tensortap.capture.ledger import Entry, Ledger
from tensortap.capture.sink import Sink
from tensortap.capture.ticket import settle
from tensortap.core.history import OVERHEAD, record_nbytes
from tensortap.core.record import Record
from tensortap.stats.columns import RecordColumns


def _nbytes(record: Record | RecordColumns) -> int:
    if isinstance(record, RecordColumns):
        bins = len(record.stats.bins) if record.stats is not None else 0
        return OVERHEAD * len(record.heads) + bins
    # a summary and its exponent bins take about 1200 bytes
    return record_nbytes(record) + (1200 if record.stats is not None else 0)


class MemorySink(Sink):
    """Keeps the latest records, up to `bound` bytes; `evicted` is how many left to make room."""

    def __init__(self, bound: int = 128 << 20, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()
        self.bound = bound
        self.evicted = 0
        self._nbytes = 0
        self._records: collections.deque[Record | RecordColumns] = collections.deque()

    @property
    def records(self) -> list[Record]:
        """The records that are held, oldest first."""
        return [record for held in list(self._records) for record in _records_in(held)]

    def send(self, entries: list[Entry]) -> None:
        for record, _, _ in entries:
            self.keep(record)
        settle(entries, True)

    def keep(self, record: Record | RecordColumns) -> None:
        """Keep a record, or several; evict the oldest ones beyond `bound` bytes."""
        self._records.append(record)
        self._nbytes += _nbytes(record)
        while self._nbytes > self.bound and self._records:
            oldest = self._records.popleft()
            self._nbytes -= _nbytes(oldest)
            self.evicted += len(oldest.heads) if isinstance(oldest, RecordColumns) else 1


def _records_in(held: Record | RecordColumns) -> list[Record]:
    return held.records() if isinstance(held, RecordColumns) else [held]
