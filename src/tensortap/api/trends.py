"""How a name has gone of late: a number for each of its last captures, and how often they come."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from tensortap.frameworks.view import as_numpy
from tensortap.history import payload_nbytes
from tensortap.record import Record, TensorData
from tensortap.stats import summarize_array

LAST = 16  # captures that a trend looks back
_KEPT = 1 << 16
_LARGEST = 1 << 22  # bytes of a tensor without statistics that are read for a trend
_PATIENCE = 0.05  # seconds that one look may take for what is not known yet
_SILENCE = 4.0  # times the usual pause, after which a name no longer comes

_Key = tuple[str, str, int, int, int]


class Trends:
    """Numbers of records, each worked out once; the next look goes on where this one stopped.

    For one thread at a time.
    """

    def __init__(self) -> None:
        self._known: dict[_Key, float | None] = {}
        self._left = _PATIENCE

    def look(self) -> None:
        """A look begins: it may take its time again."""
        self._left = _PATIENCE

    def of(self, records: Sequence[Record]) -> tuple[float, ...]:
        """One number for each record that has one, oldest to newest.

        Where time is short, the oldest are left out until the next look: a trend has no gaps.
        """
        found: list[float] = []
        for record in reversed(records):
            if record.stats is not None or not isinstance(record.value, TensorData):
                number = number_of(record)
            elif (key := self._worked_out(record)) is not None:
                number = self._known[key]
            else:
                break
            if number is not None:
                found.append(number)
        return tuple(reversed(found))

    def _worked_out(self, record: Record) -> _Key | None:
        """Where its number stands; None if there is no time left to work it out."""
        key = (record.name, record.kind.value, record.rank, record.seq, record.time_ns)
        if key not in self._known:
            if self._left <= 0:
                return None
            start = time.monotonic()
            if len(self._known) >= _KEPT:
                for old in list(self._known)[: _KEPT // 4]:
                    del self._known[old]
            self._known[key] = number_of(record)
            self._left -= time.monotonic() - start
        return key


def number_of(record: Record) -> float | None:
    """A number as it is, a tensor's root mean square; NaN where not all of it is finite.

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
    if stats is None and isinstance(value, TensorData):
        if payload_nbytes(value) <= _LARGEST:
            try:
                stats = summarize_array(as_numpy(value))
            except (TypeError, ValueError):  # dates and strings
                return None
    if stats is None or not stats.count:
        return None
    if stats.finite < stats.count:
        return math.nan
    # a number in an array of its own has a sign
    return stats.min if stats.count == 1 else stats.rm2


def rate_of(records: Sequence[Record], now_ns: int | None = None) -> float:
    """Captures a second of late; 0 when they have stopped coming.

    >>> from tensortap.record import Kind
    >>> each = [Record("x", Kind.VALUE, i, 0, i, 0, 1, i * 10**9) for i in range(5)]
    >>> rate_of(each, now_ns=5 * 10**9), rate_of(each, now_ns=60 * 10**9)
    (1.0, 0.0)
    """
    if len(records) < 2:
        return 0.0
    now = time.time_ns() if now_ns is None else now_ns
    span = records[-1].time_ns - records[0].time_ns
    pause = max(span / (len(records) - 1), 1.0)
    if now - records[-1].time_ns > max(_SILENCE * pause, 2e9):
        return 0.0
    return 1e9 / pause
