"""The range of a film, and ticks."""

from __future__ import annotations

import math

from tensortap.errors import TensortapError
from tensortap.text.tensors import number
from tensortap.viz.reals import Range, nonempty

Ticks = list[tuple[float, str]]  # positions and labels
_SHRINK = 0.1  # share of the way to the tensor's own range, per frame
_LARGEST = 8.9e307  # half of the largest float64, so that a difference of two is finite


class RangeFollower:
    """The range of a film, frame by frame.

    ``"follow"`` grows at once, so that no value lies outside, and shrinks slowly, so that nothing
    flickers. ``"exact"`` is the range of each frame, ``"fixed"`` that of the first frame with
    finite values. A pair is used as it is.

    >>> follower = RangeFollower("follow")
    >>> follower.next(0.0, 1.0), follower.next(0.0, 2.0), follower.next(0.0, 1.0)
    ((0.0, 1.0), (0.0, 2.0), (0.0, 1.9))
    """

    def __init__(self, rule: str | Range) -> None:
        if isinstance(rule, str):
            if rule not in ("follow", "exact", "fixed"):
                raise TensortapError(
                    f"range must be 'follow', 'exact', 'fixed' or a pair like (-1, 1), got {rule!r}"
                )
        elif len([*rule]) != 2 or not all(map(math.isfinite, rule)) or rule[0] >= rule[1]:
            raise TensortapError(f"range must be two numbers, the smaller first; got {rule}")
        self._rule = rule
        self._low, self._high = math.nan, math.nan

    def next(self, low: float, high: float, *, symmetric: bool = False) -> Range:
        """Return the range for a frame with values from `low` to `high` (NaN: none is finite).

        `symmetric` puts zero in the middle.
        """
        if not isinstance(self._rule, str):
            return float(self._rule[0]), float(self._rule[1])
        if not math.isnan(low):
            low, high = max(low, -_LARGEST), min(high, _LARGEST)
            if symmetric:
                low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
            if math.isnan(self._low) or self._rule == "exact":
                self._low, self._high = low, high
            elif self._rule == "follow":
                self._low = min(low, self._low + (low - self._low) * _SHRINK)
                self._high = max(high, self._high + (high - self._high) * _SHRINK)
        if math.isnan(self._low):
            return (-1.0, 1.0) if symmetric else (0.0, 1.0)
        return nonempty(self._low, self._high)


def ticks(low: float, high: float, most: int) -> Ticks:
    """Return at most so many round numbers within a range, with their texts.

    >>> ticks(-1.2, 1.3, 6)
    [(-1.0, '-1'), (-0.5, '-0.5'), (0.0, '0'), (0.5, '0.5'), (1.0, '1')]
    """
    if not low < high or most < 1:
        return []
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 2.5, 5, 10, 20):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            break
    # enough digits to tell neighbors apart
    largest = max(abs(first), abs(last)) or 1
    digits = min(15, max(3, math.ceil(math.log10(largest)) + 2))
    return [(i * step, number(i * step, digits)) for i in range(first, last + 1)]


def cell_ticks(count: int, most: int) -> list[int]:
    """Return at most so many round positions along an axis of `count` cells.

    >>> cell_ticks(256, 6), cell_ticks(3, 6), cell_ticks(1, 6)
    ([0, 50, 100, 150, 200, 250], [0, 1, 2], [0])
    """
    step = 1
    while (count - 1) // step + 1 > max(most, 1):
        step = step * 2 if str(step)[0] != "2" else step * 5 // 2
    return list(range(0, count, step))


def as_shares(limits: Range, found: Ticks) -> Ticks:
    """Return ticks at shares of a range instead of values."""
    low, high = limits
    return [((value - low) / (high - low), words) for value, words in found]
