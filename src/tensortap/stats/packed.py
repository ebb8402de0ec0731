"""The statistics of a tensor as one small vector of 32-bit words.

A device that reduces a tensor hands over nothing else, in one copy. The words are unsigned, so
that counts are exact up to 2**32 on devices that have no 64-bit numbers; figures are two words
each, of bits:

====== ======================================================================================
word   holds
====== ======================================================================================
0      `NARROW` or `WIDE`: how figures are spelled; 0 where there was nothing to reduce
1      the unit: averages are of ``x / 2**unit``, so that no eighth power leaves the range
2-5    zeros, NaNs, positive and negative infinities
6-11   min, max, min_abs, as they are
12-23  mean, variance (over n), mean_abs, and the means of x^2, x^4, x^8, in the unit
24-    exponent counts: `Layout.bins` of them, the first one for ``2**Layout.first``
====== ======================================================================================

A narrow figure is the sum of two float32, a wide one the two halves of a float64. All are over
the finite values.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.dtypes import DTYPES
from tensortap.record import Summary
from tensortap.stats.merge import Moments, dense, figures

if TYPE_CHECKING:
    from numpy.typing import NDArray

NARROW, WIDE = 1, 2
HEAD = 24
"""Words before the exponent counts."""

MOST = (1 << 32) - 1
"""Elements that one vector can count."""


class Layout(NamedTuple):
    """Which exponents the counts are for, and whether figures are float64."""

    first: int
    bins: int
    wide: bool

    @property
    def words(self) -> int:
        """How many words the vector has."""
        return HEAD + self.bins


@functools.cache
def layout(dtype: str) -> Layout:
    """The layout for a dtype, by its name.

    >>> layout("float16")
    Layout(first=-24, bins=40, wide=False)
    """
    row = DTYPES.get(dtype)
    # devices have no arithmetic for complex numbers of 16-bit halves
    if row is None or row.kind == "bits" or (row.kind == "complex" and row.bits < 64):
        raise TypeError(f"no statistics on the device for dtype {dtype}")
    first, last = row.exponents
    return Layout(first, last - first + 1, DTYPES.get(row.part, row).bits == 64)


def unpack(vector: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> Summary | None:
    """The summary that a vector holds; None where nothing was reduced (a branch not taken).

    >>> import numpy as np
    >>> unpack(np.zeros(layout("float32").words, np.uint32), "float32", (3,)) is None
    True
    """
    import numpy as np

    words = np.ascontiguousarray(vector).view(np.uint32).reshape(-1)
    kind = layout(dtype)
    if words.size != kind.words:
        raise ValueError(
            f"a vector for {dtype} has {kind.words} words, not {words.size}: {vector.dtype}"
        )
    if not words[0]:
        return None
    count = math.prod(shape)
    zeros, nans, posinfs, neginfs = words[2:6].tolist()
    if words[0] == WIDE:
        numbers = words[6:HEAD].view(np.float64).tolist()
    else:
        halves = words[6:HEAD].view(np.float32).astype(np.float64)
        # by their bits: where this thread flushes subnormals, a conversion would lose them
        low = (words[6:HEAD] & np.uint32(0x7F800000)) == 0
        if low.any():
            sign = np.where(words[6:HEAD] >> np.uint32(31), -1.0, 1.0)
            mantissas = (words[6:HEAD] & np.uint32(0x7FFFFF)).astype(np.float64)
            halves = np.where(low, sign * mantissas * 2.0**-149, halves)
        numbers = (halves[0::2] + halves[1::2]).tolist()
    low_, high, min_abs, mean, variance, mean_abs, p2, p4, p8 = numbers
    n = count - nans - posinfs - neginfs
    exponent = int(words[1:2].view(np.int32)[0])
    m = Moments(n, exponent, mean, max(0.0, variance) * n, mean_abs, p2, p4, p8)
    averages = figures(m)
    if n == 0:
        low_ = high = min_abs = math.nan
    bins = {kind.first + int(i): int(words[HEAD + i]) for i in np.flatnonzero(words[HEAD:])}
    first_bin, counts = dense(bins)
    mean, std, mean_abs, rm2, rm4, rm8 = averages
    return Summary(
        count=count,
        zeros=zeros,
        nans=nans,
        posinfs=posinfs,
        neginfs=neginfs,
        min=low_ + 0.0,  # +0.0 makes 0.0 of -0.0
        max=high + 0.0,
        mean=mean,
        std=std,
        mean_abs=mean_abs,
        max_abs=max(-low_, high) + 0.0,
        min_abs=min_abs + 0.0,
        rm2=rm2,
        rm4=rm4,
        rm8=rm8,
        first_bin=first_bin,
        bins=counts,
    )
