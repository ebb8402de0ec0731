"""A bounded cache of what was computed for a record."""

from __future__ import annotations

from typing import TypeVar

from tensortap.record import Record

Computed = TypeVar("Computed")
RecordKey = tuple[str, str, int, int, int]


def record_key(record: Record) -> RecordKey:
    """Return what identifies a record, without a reference to its value."""
    return record.name, record.kind.value, record.rank, record.seq, record.time_ns


class RecordCache(dict[RecordKey, Computed]):
    """A dict that evicts its oldest quarter when it is full."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __setitem__(self, key: RecordKey, computed: Computed) -> None:
        if len(self) >= self.size:
            for old in list(self)[: self.size // 4]:
                self.pop(old, None)
        super().__setitem__(key, computed)
