"""The summary of an array in memory, computed by NumPy alone.

Chunks that fit into the cache are converted to float64 and added up one after the other. For 8-bit
and large 16-bit arrays the bit patterns are counted instead: at most 65,536 values, each with the
number of its occurrences.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Summary
from tensortap.stats.conversion import Piece, as_float64, check_numeric, pieces
from tensortap.stats.merge import Moments, add, in_unit, scale, summary_of, unit

_CHUNK = 1 << 16  # elements: as float64, two such arrays fit into a usual L2 cache
_PATTERN_CHUNK = 1 << 18  # larger, because each adds a table of 65,536 counts
_WORTH_A_TABLE = 1 << 17  # number of 16-bit elements from which counting patterns is faster
_SAFE = 100  # within 2**±100, no eighth power leaves float64
_FIELD = 52  # the first bit of the exponent of a float64
_FIELDS = 1 << 11  # values of the exponent field, from zeros and subnormals to Inf and NaN
_BIAS = 1023


def summarize_array(array: NDArray[Any]) -> Summary:
    """Return the statistics of an array, like `tensortap.stats.summarize_array`."""
    array = np.asarray(array)
    check_numeric(array.dtype)
    totals = _Totals(min(array.size, _CHUNK))
    # nan, overflow and underflow are expected here, whatever the user's np.seterr says
    with np.errstate(all="ignore"):
        if _by_patterns(array):
            counts = _count_patterns(array)
            occurring = np.flatnonzero(counts)
            table = pattern_values(array.dtype.newbyteorder("="))
            totals.add(Piece(table[occurring]), counts[occurring])
        else:
            for chunk in _chunks(array, _CHUNK):
                for piece in pieces(chunk):
                    totals.add(piece)
    return totals.summary(array.size)


def _chunks(array: NDArray[Any], size: int) -> Iterator[NDArray[Any]]:
    """Yield all elements in one-dimensional, contiguous chunks of native byte order.

    A chunk is valid only until the next one is requested.
    """
    if not array.size:
        return
    native = array.dtype.newbyteorder("=")
    flags = array.flags
    if array.ndim == 0 or flags.c_contiguous or flags.f_contiguous:
        flat = array.ravel(order="K")
        for start in range(0, array.size, size):
            yield flat[start : start + size].astype(native, copy=False)
        return
    chunks = np.nditer(  # type: ignore[call-overload]  # NumPy's stub spells it "config"
        array,
        flags=["external_loop", "buffered"],
        op_flags=[["readonly", "contig"]],
        order="K",
        buffersize=size,
    )
    for chunk in chunks:
        yield chunk.astype(native, copy=False)


def _by_patterns(array: NDArray[Any]) -> bool:
    if array.dtype.fields is not None or array.dtype.itemsize > 2:
        return False
    return array.dtype.itemsize == 1 or array.size >= _WORTH_A_TABLE


def _count_patterns(array: NDArray[Any]) -> NDArray[np.int64]:
    bits = np.dtype(f"u{array.dtype.itemsize}")
    patterns = 1 << 8 * array.dtype.itemsize
    counts = np.zeros(patterns, np.int64)
    for chunk in _chunks(array, _PATTERN_CHUNK):
        counts += np.bincount(chunk.view(bits), minlength=patterns)
    return counts


@functools.cache
def pattern_values(dtype: np.dtype[Any]) -> NDArray[np.float64]:
    """Return the value of every bit pattern of an 8- or 16-bit dtype."""
    patterns = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    table = as_float64(patterns.view(dtype))
    table.flags.writeable = False
    return table


class _Totals:
    """Counts and moments of the chunks so far."""

    def __init__(self, chunk: int) -> None:
        self._floats = np.empty(chunk)
        self._ints = np.empty(chunk, np.uint64)
        self._zeros = self._nans = self._posinfs = self._neginfs = 0
        self._moments = Moments()
        self._exponents: collections.Counter[int] = collections.Counter()

    def add(self, piece: Piece, weights: NDArray[np.int64] | None = None) -> None:
        """Add the values of a piece, each as often as its weight says (by default once)."""
        x, ruler, shift = piece
        if not x.size:
            return
        bits = (x if ruler is None else ruler).view(np.uint64)
        work = self._ints[: x.size]
        fields = np.right_shift(bits, np.uint64(_FIELD), out=work).view(np.int64)
        both_signs = np.bincount(fields, weights, minlength=2 * _FIELDS)
        counts = both_signs.reshape(2, _FIELDS).sum(axis=0).astype(np.int64)
        if counts[-1]:
            self._add_with_nonfinite(piece, weights)
            return
        if counts[0]:
            # by their bits: if subnormals are flushed, a comparison takes them for zeros
            doubled = np.left_shift(bits, np.uint64(1), out=work)
            if weights is None:
                zeros = doubled.size - int(np.count_nonzero(doubled))
            else:
                zeros = int(weights[doubled == 0].sum())
            self._zeros += zeros
            if zeros < counts[0]:
                self._add_subnormals(doubled)
            counts[0] = 0
        for field in np.flatnonzero(counts).tolist():
            self._exponents[field - _BIAS + shift] += int(counts[field])
        self._add_moments(x, weights, shift)

    def _add_with_nonfinite(self, piece: Piece, weights: NDArray[np.int64] | None) -> None:
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
        """Count the exponents of subnormal float64; `doubled` are the bits without the sign.

        There are no weights: no 8- or 16-bit value is subnormal as a float64.
        """
        low = doubled[(doubled != 0) & (doubled < np.uint64(1 << (_FIELD + 1)))]
        mantissas = (low >> np.uint64(1)).astype(np.float64)
        exponents = np.frexp(mantissas)[1] - (_BIAS + _FIELD)
        for exponent, n in zip(*np.unique(exponents, return_counts=True), strict=True):
            self._exponents[int(exponent)] += int(n)

    def _add_moments(
        self, x: NDArray[np.float64], weights: NDArray[np.int64] | None, shift: int
    ) -> None:
        n = x.size if weights is None else int(weights.sum())
        low, high = float(x.min()), float(x.max())
        max_abs = max(-low, high)
        min_abs = max(low, -high)  # correct unless zero is between them
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
            if min_abs < 0:  # from x, because scaling may have lost it
                min_abs = float(np.abs(x, out=work).min())
            mean_abs = average(np.abs(y, out=work))
            p2 = average(np.multiply(y, y, out=work))
            p4 = average(np.multiply(work, work, out=work))
            p8 = average(np.multiply(work, work, out=work))
            # correct both for the rounding error of the mean, for small deviations
            rest = average(np.subtract(y, mean, out=work))
            m2 = max(0.0, n * (average(np.multiply(work, work, out=work)) - rest * rest))
            moments = Moments(n, own, mean + rest, m2, mean_abs, p2, p4, p8)
            moments = in_unit(moments, exponent)
        moments = moments._replace(
            exponent=exponent + shift,
            low=scale(low, shift),
            high=scale(high, shift),
            min_abs=scale(min_abs, shift),
        )
        self._moments = add(self._moments, moments)

    def summary(self, count: int) -> Summary:
        """Return the summary of all pieces; `count` is the size of the array."""
        counts = count, self._zeros, self._nans, self._posinfs, self._neginfs
        return summary_of(self._moments, counts, self._exponents)
