"""What a tensor would lose in another format, told from its exponent counts alone.

The exponent of a value decides nearly everything: whether it comes out as zero, as a subnormal
number, or beyond the largest one. Undecided is only the bin that a limit runs through. There the
exact smallest and largest value help, and where they do not, two figures are given: what is
certain, and what it is at most.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.dtypes import DTYPES
from tensortap.errors import NotFound
from tensortap.record import Summary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]
    Reals = NDArray[np.float64]


class Limits(NamedTuple):
    """Where a format ends, for values that are rounded to the nearest."""

    dtype: str
    zero: int  # below 2**zero, half of the smallest number, all is lost
    half_is_lost: bool  # and so is exactly 2**zero
    normal: int  # below 2**normal, numbers have fewer digits
    top: int  # the bin of the largest number
    over: float  # from here on it is too large
    over_is_lost: bool  # and so is exactly that


@functools.lru_cache(64)
def limits(dtype: str) -> Limits:
    """The limits of a float format by its name.

    >>> limits("float8_e4m3fn")
    Limits(dtype='float8_e4m3fn', zero=-10, half_is_lost=True, normal=-6, top=8, over=464.0,
           over_is_lost=False)
    """
    row = DTYPES.get(dtype)
    if row is None or row.format is None:
        known = ", ".join(name for name, other in DTYPES.items() if other.kind == "float")
        raise NotFound(f"no float format is called {dtype!r}; there are {known}")
    digits, normal, largest = row.format
    smallest, exponent = row.exponents
    step = math.ldexp(1.0, exponent - (digits - 1))
    # halfway between the largest number and the one that would come next; a tie goes to the
    # even one, and a format of bare exponents rounds it up
    odd = int(largest / step) % 2 == 1
    return Limits(
        dtype,
        zero=smallest - 1,
        half_is_lost=digits > 1,
        normal=normal,
        top=exponent,
        over=largest + step / 2,
        over_is_lost=odd or digits == 1,
    )


class Loss(NamedTuple):
    """How many nonzero finite values there are, and what becomes of them; an array each."""

    values: Counts
    underflow: Counts
    underflow_at_most: Counts
    subnormal: Counts
    overflow: Counts
    overflow_at_most: Counts


class Exponents(NamedTuple):
    """The exponents of many tensors, a column each: ``counts[i]`` is that of bin ``low + i``.

    `min_abs` and `max_abs` are the exact extremes; 0.0 is an unknown minimum.
    """

    low: int
    counts: Counts
    min_abs: Reals
    max_abs: Reals


def losses(tensors: Exponents, target: Limits, shift: int = 0) -> Loss:
    """What becomes of tensors in a format, multiplied by ``2**shift`` before."""
    return _Cumulated(tensors).losses(target, shift)


class _Cumulated:
    """How many values lie below a power of two."""

    def __init__(self, tensors: Exponents) -> None:
        import numpy as np

        self.low, counts, self.min_abs, self.max_abs = tensors
        self._below = np.zeros((len(counts) + 1, counts.shape[1]), np.int64)
        np.cumsum(counts, axis=0, out=self._below[1:])
        self.values: Counts = self._below[-1]
        filled = np.flatnonzero(counts.any(axis=1))
        self.first = self.low + int(filled[0]) if len(filled) else 0
        self.last = self.low + int(filled[-1]) if len(filled) else 0

    def below(self, exponent: int) -> Counts:
        place = min(max(exponent - self.low, 0), len(self._below) - 1)
        found: Counts = self._below[place]
        return found

    def losses(self, target: Limits, shift: int) -> Loss:
        import numpy as np

        zero, top = target.zero - shift, target.top - shift
        lost = under = self.below(zero)
        small = self.below(zero + 1)
        if target.half_is_lost and zero >= -1074:
            half = math.ldexp(1.0, zero)
            under = np.where(self.max_abs == half, small, lost + (self.min_abs == half))
            small = np.where(self.min_abs > half, under, small)
        else:
            small = under
        over_at_least = self.values - self.below(top + 1)
        over_at_most = self.values - self.below(top)
        try:
            over = math.ldexp(target.over, -shift)
        except OverflowError:
            over = math.inf
        beyond = np.greater_equal if target.over_is_lost else np.greater
        some, every = beyond(self.max_abs, over), beyond(self.min_abs, over)
        # the largest of all is too large and in the undecided bin: that is one at least
        here = some & (over_at_least == 0)
        over_at_least = np.where(every, over_at_most, over_at_least + here)
        over_at_most = np.where(some, over_at_most, over_at_least)
        subnormal = self.below(target.normal - shift) - under
        return Loss(
            self.values, under, small, np.maximum(subnormal, 0), over_at_least, over_at_most
        )


def best_shifts(tensors: Exponents, target: Limits) -> Counts:
    """The power of two for each tensor that loses least.

    Lost is what underflows for certain and what may overflow. Where that is equal, fewer
    subnormal numbers are better, then a smaller shift.
    """
    import numpy as np

    exponents = _Cumulated(tensors)
    lowest = min(0, target.top - exponents.last - 1)
    highest = max(0, target.normal - exponents.first + 1)
    count = tensors.counts.shape[1]
    best = np.zeros(count, np.int64)
    least = np.full(count, np.iinfo(np.int64).max)
    fewest = least.copy()
    for shift in sorted(range(lowest, highest + 1), key=lambda j: (abs(j), j)):
        found = exponents.losses(target, shift)
        lost = found.underflow + found.overflow_at_most
        better = (lost < least) | ((lost == least) & (found.subnormal < fewest))
        best[better] = shift
        least[better] = lost[better]
        fewest[better] = found.subnormal[better]
    return best


def losses_at(tensors: Exponents, target: Limits, shifts: Counts) -> Loss:
    """What becomes of each tensor with a shift of its own."""
    import numpy as np

    exponents = _Cumulated(tensors)
    whole = [np.zeros_like(exponents.values) for _ in Loss._fields]
    for shift in np.unique(shifts).tolist():
        mine = shifts == shift
        for column, found in zip(whole, exponents.losses(target, shift), strict=True):
            column[mine] = found[mine]
    return Loss(*whole)


class WhatIf(NamedTuple):
    """What a tensor would lose in a format: shares of its nonzero finite values.

    `scaled` is the share that is lost, at most, after multiplying by ``2**shift``.
    """

    dtype: str
    values: int
    underflow: float
    underflow_at_most: float
    subnormal: float
    overflow: float
    overflow_at_most: float
    shift: int
    scaled: float


SHARES = ("underflow", "underflow_at_most", "subnormal", "overflow", "overflow_at_most")


def shares(tensors: Exponents, target: Limits) -> dict[str, Any]:
    """The columns of `WhatIf`, but for the dtype, for many tensors."""
    import numpy as np

    plain = losses(tensors, target)
    shift = best_shifts(tensors, target)
    scaled = losses_at(tensors, target, shift)
    with np.errstate(invalid="ignore"):  # of nothing there is no share: nan
        columns: dict[str, Any] = {"values": plain.values}
        columns.update({name: getattr(plain, name) / plain.values for name in SHARES})
        columns["shift"] = shift
        columns["scaled"] = (scaled.underflow_at_most + scaled.overflow_at_most) / plain.values
    return columns


def what_if(summary: Summary, dtype: str) -> WhatIf:
    """What a tensor with these statistics would lose in another format.

    >>> from tensortap.stats import summarize_array
    >>> import numpy as np
    >>> found = what_if(summarize_array(np.array([1e-4, 1.0, 3.0, 1000.0])), "float8_e4m3fn")
    >>> found.underflow, found.overflow, found.shift
    (0.25, 0.25, -2)
    """
    import numpy as np

    bins = summary.bins or (0,)
    counts = np.array(bins, np.int64)[:, None]
    extremes = np.array([[summary.min_abs], [summary.max_abs]])
    tensors = Exponents(summary.first_bin, counts, *extremes)
    columns = shares(tensors, limits(dtype))
    return WhatIf(dtype, *(column[0].item() for column in columns.values()))
