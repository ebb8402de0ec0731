"""Recent trend and capture rate per name, and a cache of what was computed for records."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TypeVar

from tensortap.frameworks.view import as_numpy
from tensortap.history import payload_nbytes
from tensortap.record import Record, TensorData
from tensortap.stats import summarize_array

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


TREND_LENGTH = 16
TIME_BUDGET = 0.05
"""Seconds that one overview may spend on trends."""

_LARGEST_TENSOR = 1 << 22  # bytes; larger ones without statistics are not read for a trend
_STOPPED_AFTER = 4.0  # times the usual interval without a capture
_numbers: RecordCache[float | None] = RecordCache(1 << 16)


def trend(records: Sequence[Record], deadline: float) -> tuple[float, ...]:
    """Return one number for each record that has one, oldest to newest.

    Numbers that need a pass over a tensor are computed once, and only until the deadline. After
    it the oldest records are left out until the next call, so that a trend never has gaps.
    """
    numbers: list[float] = []
    for record in reversed(records):
        if record.stats is not None or not isinstance(record.value, TensorData):
            number = number_of(record)
        else:
            key = record_key(record)
            if key not in _numbers:
                if time.monotonic() > deadline:
                    break
                _numbers[key] = number_of(record)
            number = _numbers.get(key)
        if number is not None:
            numbers.append(number)
    return tuple(reversed(numbers))


def number_of(record: Record) -> float | None:
    """Return a number as it is, a tensor's root mean square; NaN if any element is not finite.

    >>> from tensortap.record import Kind
    >>> number_of(Record("loss", Kind.VALUE, 0, 0, 0, 0, 1, 0, value=0.5))
    0.5
    """
    value = record.value
    if isinstance(value, (bool, int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.copysign(math.inf, value)
    stats = record.stats
    if stats is None and isinstance(value, TensorData) and payload_nbytes(value) <= _LARGEST_TENSOR:
        try:
            stats = summarize_array(as_numpy(value))
        except (TypeError, ValueError):  # dates and strings
            return None
    if stats is None or not stats.count:
        return None
    if stats.finite < stats.count:
        return math.nan
    # the only element of a tensor keeps its sign
    return stats.min if stats.count == 1 else stats.rm2


def captures_per_second(records: Sequence[Record], now_ns: int | None = None) -> float:
    """Return the recent capture rate; 0 once captures have stopped.

    >>> from tensortap.record import Kind
    >>> each = [Record("x", Kind.VALUE, i, 0, i, 0, 1, i * 10**9) for i in range(5)]
    >>> captures_per_second(each, now_ns=5 * 10**9), captures_per_second(each, now_ns=60 * 10**9)
    (1.0, 0.0)
    """
    if len(records) < 2:
        return 0.0
    now = time.time_ns() if now_ns is None else now_ns
    interval = max((records[-1].time_ns - records[0].time_ns) / (len(records) - 1), 1.0)
    if now - records[-1].time_ns > max(_STOPPED_AFTER * interval, 2e9):
        return 0.0
    return 1e9 / interval
