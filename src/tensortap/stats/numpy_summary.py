"""The summary of an array in memory, with NumPy alone.

Chunks that fit into the cache are turned to float64 and added up one after the other. Of
8-bit and large 16-bit arrays the bit patterns are counted first: a table of at most 65,536
values, with how often each occurs, says everything.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tensortap.record import Summary
from tensortap.stats import values
from tensortap.stats.merge import Moments, add, dense, figures, in_unit, scale, unit
from tensortap.stats.values import Piece

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CHUNK = 1 << 16  # elements: in float64, two arrays of this size fit into a usual L2 cache
_PATTERN_CHUNK = 1 << 18  # larger, to make up for adding tables of 65,536 counts
_WORTH_A_TABLE = 1 << 17  # 16-bit elements from which counting patterns is the faster way
_SAFE = 100  # within 2**±100, no eighth power leaves float64
_FIELD = 52  # the bit where the exponent of a float64 begins
_FIELDS = 1 << 11  # values that it takes, from zeros and subnormals to Inf and NaN
_BIAS = 1023


def summarize_array(array: NDArray[Any]) -> Summary:
    """The statistics of an array: exact counts, figures over the finite values.

    Complex numbers count by their magnitude. Where no value is finite (an empty array, all
    NaN), every figure is nan. Arrays that hold no numbers raise TypeError.

    >>> import numpy as np
    >>> s = summarize_array(np.array([1.0, -3.0, 0.0, np.nan]))
    >>> s.count, s.zeros, s.nans, s.min, s.max, s.exponents
    (4, 1, 1, -3.0, 1.0, {0: 1, 1: 1})
    """
    import numpy as np

    array = np.asarray(array)
    values.check(array.dtype)
    tally = _Tally(min(array.size, _CHUNK))
    # nan, overflow and underflow are expected here, whatever the user's np.seterr says
    with np.errstate(all="ignore"):
        if _by_patterns(array):
            counts = _count_patterns(array)
            seen = np.flatnonzero(counts)
            table = pattern_values(array.dtype.newbyteorder("="))
            tally.add(Piece(table[seen]), counts[seen])
        else:
            for chunk in _chunks(array, _CHUNK):
                for piece in values.pieces(chunk):
                    tally.add(piece)
    return tally.summary(array.size)


def _chunks(array: NDArray[Any], size: int) -> Iterator[NDArray[Any]]:
    """The elements in pieces of one dimension: contiguous, in native byte order, in any order.

    A piece is only valid until the next one is asked for.
    """
    import numpy as np

    if not array.size:
        return
    native = array.dtype.newbyteorder("=")
    flags = array.flags
    if array.ndim == 0 or flags.c_contiguous or flags.f_contiguous:
        flat = array.ravel(order="K")
        for start in range(0, array.size, size):
            yield flat[start : start + size].astype(native, copy=False)
        return
    pieces = np.nditer(  # type: ignore[call-overload]  # NumPy's stub spells it "config"
        array,
        flags=["external_loop", "buffered"],
        op_flags=[["readonly", "contig"]],
        order="K",
        buffersize=size,
    )
    for piece in pieces:
        yield piece.astype(native, copy=False)


def _by_patterns(array: NDArray[Any]) -> bool:
    if array.dtype.fields is not None or array.dtype.itemsize > 2:
        return False
    return array.dtype.itemsize == 1 or array.size >= _WORTH_A_TABLE


def _count_patterns(array: NDArray[Any]) -> NDArray[np.int64]:
    import numpy as np

    bits = np.dtype(f"u{array.dtype.itemsize}")
    patterns = 1 << 8 * array.dtype.itemsize
    counts = np.zeros(patterns, np.int64)
    for chunk in _chunks(array, _PATTERN_CHUNK):
        counts += np.bincount(chunk.view(bits), minlength=patterns)
    return counts


@functools.cache
def pattern_values(dtype: np.dtype[Any]) -> NDArray[np.float64]:
    """The value of every bit pattern of an 8- or 16-bit dtype."""
    import numpy as np

    patterns = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    table = values.float64(patterns.view(dtype))
    table.flags.writeable = False
    return table


class _Tally:
    """What the chunks of one array add up to."""

    def __init__(self, chunk: int) -> None:
        import numpy as np

        self._floats = np.empty(chunk)
        self._ints = np.empty(chunk, np.uint64)
        self._zeros = self._nans = self._posinfs = self._neginfs = 0
        self._min = self._min_abs = math.inf
        self._max = self._max_abs = -math.inf
        self._moments = Moments()
        self._bins: collections.Counter[int] = collections.Counter()

    def add(self, piece: Piece, weights: NDArray[np.int64] | None = None) -> None:
        """Take in the values of a piece, each as often as its weight says (once)."""
        import numpy as np

        x, ruler, shift = piece
        if not x.size:
            return
        bits = (x if ruler is None else ruler).view(np.uint64)
        work = self._ints[: x.size]
        fields = np.right_shift(bits, np.uint64(_FIELD), out=work).view(np.int64)
        both_signs = np.bincount(fields, weights, minlength=2 * _FIELDS)
        seen = both_signs.reshape(2, _FIELDS).sum(axis=0).astype(np.int64)
        if seen[-1]:
            self._add_with_nonfinite(piece, weights)
            return
        if seen[0]:
            # by their bits: where subnormals are flushed, a comparison takes them for zeros
            doubled = np.left_shift(bits, np.uint64(1), out=work)
            if weights is None:
                zeros = doubled.size - int(np.count_nonzero(doubled))
            else:
                zeros = int(weights[doubled == 0].sum())
            self._zeros += zeros
            if zeros < seen[0]:
                self._add_subnormals(doubled)
            seen[0] = 0
        for field in np.flatnonzero(seen).tolist():
            self._bins[field - _BIAS + shift] += int(seen[field])
        self._add_figures(x, weights, shift)

    def _add_with_nonfinite(self, piece: Piece, weights: NDArray[np.int64] | None) -> None:
        import numpy as np

        x, ruler, shift = piece

        def count(which: NDArray[np.bool_]) -> int:
            return int(np.count_nonzero(which) if weights is None else weights[which].sum())

        self._nans += count(np.isnan(x))
        self._posinfs += count(x == np.inf)
        self._neginfs += count(x == -np.inf)
        finite = np.isfinite(x)
        rest = Piece(x[finite], None if ruler is None else ruler[finite], shift)
        self.add(rest, None if weights is None else weights[finite])

    def _add_subnormals(self, doubled: NDArray[np.uint64]) -> None:
        """Count the subnormal float64 where they belong; `doubled` are the bits but the sign.

        They come unweighted: no value of 8 or 16 bits is subnormal as a float64.
        """
        import numpy as np

        low = doubled[(doubled != 0) & (doubled < np.uint64(1 << (_FIELD + 1)))]
        mantissas = (low >> np.uint64(1)).astype(np.float64)
        exponents = np.frexp(mantissas)[1] - (_BIAS + _FIELD)
        for exponent, n in zip(*np.unique(exponents, return_counts=True), strict=True):
            self._bins[int(exponent)] += int(n)

    def _add_figures(
        self, x: NDArray[np.float64], weights: NDArray[np.int64] | None, shift: int
    ) -> None:
        import numpy as np

        n = x.size if weights is None else int(weights.sum())
        low, high = float(x.min()), float(x.max())
        max_abs = max(-low, high)
        min_abs = max(low, -high)  # unless zero lies between them
        exponent = unit(max_abs)
        if low == high:
            only = math.ldexp(low, -exponent) if low else 0.0
            moments = Moments(n, exponent, only, 0.0, abs(only), only**2, only**4, only**8)
        else:
            work = self._floats[: x.size]
            own = 0 if abs(exponent) <= _SAFE else exponent
            y = np.ldexp(x, -own) if own else x

            def average(z: NDArray[np.float64]) -> float:
                return float(z.sum() if weights is None else (z * weights).sum()) / n

            mean = average(y)
            if min_abs < 0:  # of x: scaling may have lost it
                min_abs = float(np.abs(x, out=work).min())
            mean_abs = average(np.abs(y, out=work))
            p2 = average(np.multiply(y, y, out=work))
            p4 = average(np.multiply(work, work, out=work))
            p8 = average(np.multiply(work, work, out=work))
            # what rounding left of the mean is taken out of both: large means, small deviations
            rest = average(np.subtract(y, mean, out=work))
            m2 = max(0.0, n * (average(np.multiply(work, work, out=work)) - rest * rest))
            moments = Moments(n, own, mean + rest, m2, mean_abs, p2, p4, p8)
            moments = in_unit(moments, exponent)
        self._moments = add(self._moments, moments._replace(exponent=exponent + shift))
        self._min = min(self._min, scale(low, shift))
        self._max = max(self._max, scale(high, shift))
        self._min_abs = min(self._min_abs, scale(min_abs, shift))
        self._max_abs = max(self._max_abs, scale(max_abs, shift))

    def summary(self, count: int) -> Summary:
        """What all pieces come to; `count` is the size of the array."""
        mean, std, mean_abs, rm2, rm4, rm8 = figures(self._moments)
        first_bin, bins = dense(self._bins)
        some = self._moments.n > 0
        return Summary(
            count=count,
            zeros=self._zeros,
            nans=self._nans,
            posinfs=self._posinfs,
            neginfs=self._neginfs,
            min=self._min + 0.0 if some else math.nan,  # +0.0 makes 0.0 of -0.0
            max=self._max + 0.0 if some else math.nan,
            mean=mean,
            std=std,
            mean_abs=mean_abs,
            max_abs=self._max_abs + 0.0 if some else math.nan,
            min_abs=self._min_abs + 0.0 if some else math.nan,
            rm2=rm2,
            rm4=rm4,
            rm8=rm8,
            first_bin=first_bin,
            bins=bins,
        )
