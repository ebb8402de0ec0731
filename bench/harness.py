"""Rows, their limits, and how to measure and print them."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass
class Row:
    """One ratio: ours over the baseline, measured alternately; `limit` is the target, if any."""

    name: str
    limit: float | None
    at_most: bool
    ours: list[float]
    base: list[float]
    unit: str = "s"
    naive: float | None = None  # the same ratio for a naive implementation
    note: str = ""
    peer: str = ""  # the package beside which we were measured, and its version
    cold_row: bool = False  # whether first calls are measured by a row of their own

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.base)

    @property
    def spread(self) -> tuple[float, float]:
        """Return the middle half of the ratios of neighboring measurements."""
        pairs = sorted(a / b for a, b in zip(self.ours, self.base, strict=False))
        return pairs[len(pairs) // 4], pairs[-1 - len(pairs) // 4]

    @property
    def first(self) -> float | None:
        """Return the ratio of our first call, which nobody warmed up; None if there is only one."""
        if self.cold_row or len(self.ours) < 2:
            return None
        return self.ours[0] / statistics.median(self.base)

    @property
    def kept(self) -> bool:
        return self._within(self.ratio)

    @property
    def first_kept(self) -> bool:
        """Whether our first call meets the same target."""
        return self.first is None or self._within(self.first)

    def _within(self, ratio: float) -> bool:
        if self.limit is None:
            return True
        return ratio <= self.limit if self.at_most else ratio >= self.limit

    def as_dict(self) -> dict[str, object]:
        low, high = self.spread
        return {
            "name": self.name,
            "ratio": self.ratio,
            "first": self.first,
            "spread": [low, high],
            "limit": self.limit,
            "at_most": self.at_most,
            "kept": self.kept,
            "first_kept": self.first_kept,
            "naive": self.naive,
            "ours": statistics.median(self.ours),
            "base": statistics.median(self.base),
            "unit": self.unit,
            "note": self.note,
            "peer": self.peer,
        }


def time_of(call: Callable[[], object], loops: int = 1) -> float:
    """Return the seconds per call over `loops` calls, with the garbage collector off."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(loops):
            call()
        return (time.perf_counter() - start) / loops
    finally:
        if enabled:
            gc.enable()


def processor_time_of(call: Callable[[], object]) -> float:
    """Return the seconds that all threads of this process spend in a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def in_turns(rounds: int, *calls: Callable[[], T]) -> list[list[T]]:
    """Return the results of the calls, made alternately so that noise affects all alike."""
    found: list[list[T]] = [[] for _ in calls]
    for _ in range(rounds):
        for results, call in zip(found, calls, strict=True):
            results.append(call())
    return found
