"""The statistics of a tensor as one small vector of 32-bit words, made on a device.

Nothing else is copied from the device. The words are unsigned, so that counts are exact up to
2**32 on devices without 64-bit integers. Each figure takes two words:

====== ======================================================================================
word   holds
====== ======================================================================================
0      `NARROW` or `WIDE`, the encoding of figures; 0 if nothing was reduced
1      the unit: averages are of ``x / 2**unit``, so that no eighth power leaves the range
2-5    counts of zeros, NaNs, positive and negative infinities
6-11   min, max, min_abs
12-23  mean, variance (over n), mean_abs, and the means of x^2, x^4, x^8, in the unit
24-    exponent counts: `Layout.bins` of them, the first for ``2**Layout.first``
====== ======================================================================================

A narrow figure is the sum of two float32, a wide one the two halves of a float64. All figures
are over the finite values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.dtypes import DTYPES
from tensortap.core.record import Summary
from tensortap.stats.conversion import as_float64
from tensortap.stats.merge import Moments
from tensortap.stats.merge import summary_of as summary_of_moments
from tensortap.values.registry import parts
from tensortap.values.snapshot import summary_of as summary_on_the_host

NARROW, WIDE = 1, 2
HEAD = 24
"""The number of words before the exponent counts."""

MOST = (1 << 32) - 1
"""The largest number of elements that one vector can count."""


class PendingSummary(NamedTuple):
    """Statistics that a device is still computing; `resolve` waits for them."""

    ready: Callable[[], bool]
    resolve: Callable[[], Summary | None]


def summary_of(value: Any) -> tuple[Summary | None, PendingSummary | None]:
    """Return the statistics of a tensor, or those that its device is still computing.

    >>> import numpy as np
    >>> summary_of(np.ones(3))[0].mean
    1.0
    """
    for part in parts("tensortap.rooms.track"):
        later: Callable[[Any], PendingSummary | None] | None
        later = getattr(part, "summarize_later", None)
        if later is not None and (pending := later(value)) is not None:
            return None, pending
    return summary_on_the_host(value), None


class Layout(NamedTuple):
    """The first exponent, the number of exponents, and whether figures are float64."""

    first: int
    bins: int
    wide: bool

    @property
    def words(self) -> int:
        """The length of the vector."""
        return HEAD + self.bins


@functools.cache
def layout(dtype: str) -> Layout:
    """Return the layout for a dtype."""
    row = DTYPES.get(dtype)
    # devices have no arithmetic for complex numbers of 16-bit halves
    if row is None or row.kind == "bits" or (row.kind == "complex" and row.bits < 64):
        raise TypeError(f"no statistics on the device for dtype {dtype}")
    first, last = row.exponents
    return Layout(first, last - first + 1, DTYPES.get(row.part, row).bits == 64)


def unpack(vector: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> Summary | None:
    """Return the summary in a vector, or None if nothing was reduced (a branch not taken)."""
    words = np.ascontiguousarray(vector).view(np.uint32).reshape(-1)
    kind = layout(dtype)
    if words.size != kind.words:
        raise ValueError(f"a vector for {dtype} has {kind.words} words, got {words.size}")
    if not words[0]:
        return None
    if words[0] == WIDE:
        figures = words[6:HEAD].view(np.float64).tolist()
    else:
        halves = as_float64(words[6:HEAD].view(np.float32))
        figures = (halves[0::2] + halves[1::2]).tolist()
    low, high, min_abs, mean, variance, mean_abs, p2, p4, p8 = figures
    count = math.prod(shape)
    zeros, nans, posinfs, neginfs = words[2:6].tolist()
    n = count - nans - posinfs - neginfs
    unit = int(words[1:2].view(np.int32)[0])
    m2 = max(0.0, variance) * n
    moments = Moments(n, unit, mean, m2, mean_abs, p2, p4, p8, low, high, min_abs)
    bins = {kind.first + int(i): int(words[HEAD + i]) for i in np.flatnonzero(words[HEAD:])}
    return summary_of_moments(moments, (count, zeros, nans, posinfs, neginfs), bins)
