"""From numbers to a range and its ticks: the range of a film follows its tensor, or stays."""

from __future__ import annotations

import math

from tensortap.errors import TensortapError
from tensortap.record import Summary
from tensortap.text.tensors import number

Range = tuple[float, float]
_SHRINK = 0.1  # of the way to the tensor's own range, a frame
_LARGEST = 8.9e307  # half of what float64 holds: a range between two of them has a length


class Follower:
    """The range of a film, frame by frame.

    ``"follow"`` grows at once, so that no value lies outside, and shrinks slowly, so that
    nothing flickers; ``"exact"`` is the range of each frame; ``"fixed"`` that of the first one
    that has any; a pair is itself. `symmetric` puts zero in the middle.

    >>> follower = Follower("follow")
    >>> follower.next(0.0, 1.0), follower.next(0.0, 2.0), follower.next(0.0, 1.0)
    ((0.0, 1.0), (0.0, 2.0), (0.0, 1.9))
    """

    def __init__(self, rule: str | Range) -> None:
        if isinstance(rule, str):
            if rule not in ("follow", "exact", "fixed"):
                raise TensortapError(
                    f"range={rule!r}: it is 'follow', 'exact', 'fixed', or a pair like (-1, 1)"
                )
        elif len([*rule]) != 2 or not all(map(math.isfinite, rule)) or rule[0] >= rule[1]:
            raise TensortapError(f"range={tuple(rule)}: a pair is two numbers, the smaller first")
        self._rule = rule
        self._low, self._high = math.nan, math.nan

    def next(self, low: float, high: float, *, symmetric: bool = False) -> Range:
        """The range for a frame of a tensor from `low` to `high` (nan: nothing is finite)."""
        if not isinstance(self._rule, str):
            return float(self._rule[0]), float(self._rule[1])
        if not math.isnan(low):
            low, high = max(low, -_LARGEST), min(high, _LARGEST)
            if symmetric:
                high = max(abs(low), abs(high))
                low = -high
            self._move(low, high)
        if math.isnan(self._low):
            return (-1.0, 1.0) if symmetric else (0.0, 1.0)
        return opened(self._low, self._high)

    def _move(self, low: float, high: float) -> None:
        if math.isnan(self._low) or self._rule == "exact":
            self._low, self._high = low, high
        elif self._rule == "follow":
            slow = self._low + (low - self._low) * _SHRINK
            self._low = min(low, slow)
            slow = self._high + (high - self._high) * _SHRINK
            self._high = max(high, slow)


def opened(low: float, high: float) -> Range:
    """A range that has a length, also where all values are the same.

    >>> opened(0.0, 0.0), opened(2.0, 2.0)
    ((-1.0, 1.0), (1.0, 3.0))
    """
    if high - low > 4e-16 * max(abs(low), abs(high)) and high - low > 1e-300:
        return low, high
    half = abs(low) / 2 or 1.0
    return (low - half, high + half) if half > 1e-300 else (low - 1.0, high + 1.0)


def range_of(summary: Summary | None) -> Range:
    """Smallest and largest finite value, or nan twice."""
    return (math.nan, math.nan) if summary is None else (summary.min, summary.max)


def ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """At most so many round numbers within a range, with what is written beside them.

    >>> ticks(-1.2, 1.3, 6)
    [(-1.0, '-1'), (-0.5, '-0.5'), (0.0, '0'), (0.5, '0.5'), (1.0, '1')]
    """
    if not low < high or most < 1:
        return []
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    for factor in (1, 2, 2.5, 5, 10, 20):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            break
    # enough digits to tell neighbours apart
    digits = 3
    largest = max(abs(first), abs(last)) or 1
    digits = max(digits, math.ceil(math.log10(largest)) + 2)
    return [(i * step, number(i * step, min(digits, 15))) for i in range(first, last + 1)]


def whole_ticks(count: int, most: int) -> list[int]:
    """Positions along an axis of `count` cells, round ones, from 0 on.

    >>> whole_ticks(256, 6), whole_ticks(3, 6), whole_ticks(1, 6)
    ([0, 50, 100, 150, 200, 250], [0, 1, 2], [0])
    """
    step = 1
    while (count - 1) // step + 1 > max(most, 1):
        leading = int(str(step)[0])
        step = step * 2 if leading != 2 else step * 5 // 2
    return list(range(0, count, step))
