"""Compare two arrays in chunks with NumPy, for what the C kernel does not cover.

Counts and maxima equal those of the kernel bit for bit; sums are added in another order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.dtypes import FloatFormat
from tensortap.rooms.compare.tensors import Figures, is_whole
from tensortap.stats.conversion import as_float64, complex_part, real_and_imag
from tensortap.stats.merge import scale

_CHUNK = 1 << 16


def compare_arrays(
    a: NDArray[Any], b: NDArray[Any], atol: float, rtol: float, equal_nan: bool, form: FloatFormat
) -> Figures:
    """Return the figures of two arrays of numbers with the same shape."""
    totals = _ChunkTotals(atol, rtol, equal_nan, form)
    with np.errstate(all="ignore"):
        for start in range(0, a.size, _CHUNK):
            totals.add(start, *(_part(each, start, start + _CHUNK) for each in (a, b)))
        return totals.figures(a.size)


def _part(array: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
    flat: Any = array.reshape(-1) if array.flags.c_contiguous else array.flat
    part = np.ascontiguousarray(flat[start:stop])
    return part.astype(part.dtype.newbyteorder("="), copy=False)


def _numbers(chunk: NDArray[Any]) -> tuple[NDArray[Any], Any]:
    """Return a chunk as float64, complex128 or wider, and what float64 cannot hold of integers."""
    if complex_part(chunk.dtype) is not None:
        real, imag = (_numbers(each)[0] for each in real_and_imag(chunk))
        both = np.empty(real.shape, np.result_type(real, np.complex128))
        both.real, both.imag = real, imag
        return both, 0.0
    if chunk.dtype.kind == "f" and chunk.dtype.itemsize > 8:
        return chunk, 0.0
    values = as_float64(chunk)
    if not is_whole(chunk.dtype) or chunk.dtype.itemsize < 8:
        return values, 0.0
    top = values >= 2.0 ** (64 if chunk.dtype.kind == "u" else 63)
    back = np.where(top, 0.0, values).astype(chunk.dtype)
    rest = (chunk - back).view(np.int64).astype(np.float64)
    below = -(np.iinfo(chunk.dtype).max - chunk).astype(np.float64) - 1.0
    return values, np.where(top, below, rest)


class _Sum:
    """A sum of squares or products, scaled by a power of two to stay within float64."""

    def __init__(self) -> None:
        self.value = 0.0
        self.unit = 0

    def add(self, value: Any, unit: int) -> None:
        value = float(value)
        if value == 0.0:
            return
        top = max(self.unit, unit) if self.value else unit
        self.value = scale(self.value, self.unit - top) + math.ldexp(value, unit - top)
        self.unit = top


class _ChunkTotals:
    def __init__(self, atol: float, rtol: float, equal_nan: bool, form: FloatFormat) -> None:
        self.atol, self.rtol, self.equal_nan, self.form = atol, rtol, equal_nan, form
        self.finite = self.mismatches = self.nonfinite = 0
        self.first_nonfinite = self.worst = -1
        self.max_abs = self.max_rel = self.factor = 0.0
        self.excess = -math.inf
        self.ulps = 0
        self.abs, self.rel = _Sum(), _Sum()
        self.dd, self.aa, self.bb, self.ab = _Sum(), _Sum(), _Sum(), _Sum()

    def add(self, start: int, a: NDArray[Any], b: NDArray[Any]) -> None:
        (x, rest_x), (y, rest_y) = _numbers(a), _numbers(b)
        finite = self._sift(start, x, y)
        common = np.result_type(x, y)
        x, y = (np.where(finite, each, 0).astype(common) for each in (x, y))
        d = np.abs(x - y + np.where(finite, rest_x - rest_y, 0.0))
        size = np.abs(y)
        allowed = self.rtol * size
        self.mismatches += int(np.count_nonzero(d > self.atol + allowed))
        ratio = np.where(d > 0, d / size, 0.0)
        self._maxima(start, d, size, ratio, allowed)
        unit = _unit(d)
        self.abs.add(np.ldexp(d, -unit).sum(), unit)
        self.dd.add(np.square(np.ldexp(d, -unit)).sum(), 2 * unit)
        self.rel.add(ratio.sum(), 0)
        # complex numbers as pairs: the sum of the products of parts is what a cosine needs
        p, q = (each.view(each.real.dtype) for each in (x, y))
        if self.form.digits:
            # unsigned, so that no difference overflows
            one, other = (ordinals(each, self.form) for each in (p, q))
            apart = np.maximum(one, other).view(np.uint64) - np.minimum(one, other).view(np.uint64)
            self.ulps = max(self.ulps, int(apart.max()))
        of_x, of_y = _unit(np.abs(p)), _unit(np.abs(q))
        p, q = np.ldexp(p, -of_x), np.ldexp(q, -of_y)
        self.aa.add((p * p).sum(), 2 * of_x)
        self.bb.add((q * q).sum(), 2 * of_y)
        self.ab.add((p * q).sum(), of_x + of_y)

    def _sift(self, start: int, x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.bool_]:
        """Judge the pairs in which one value is not finite; return which pairs are."""
        finite: NDArray[np.bool_] = np.isfinite(x) & np.isfinite(y)
        self.finite += int(np.count_nonzero(finite))
        both_nan = np.isnan(x) & np.isnan(y) & self.equal_nan
        unequal = np.flatnonzero(~finite & ~both_nan & (x != y))
        self.nonfinite += unequal.size
        self.mismatches += unequal.size
        if unequal.size and self.first_nonfinite < 0:
            self.first_nonfinite = start + int(unequal[0])
        return finite

    def _maxima(self, start: int, d: Any, size: Any, ratio: Any, allowed: Any) -> None:
        self.max_abs = max(self.max_abs, float(d.max()))
        self.max_rel = max(self.max_rel, float(ratio.max()))
        over = d > self.atol
        if over.any():
            factors = (d[over] - self.atol) / size[over]
            self.factor = max(self.factor, float(factors.max()))
        if not d.any():
            return
        excess = np.where(d > 0, d - allowed, -np.inf)
        at = int(excess.argmax())
        if not d[at] > 0:  # all of them are -inf: take the first that differs
            at = int(np.flatnonzero(d > 0)[0])
        if self.worst < 0 or float(excess[at]) > self.excess:
            self.excess, self.worst = float(excess[at]), start + at

    def figures(self, count: int) -> Figures:
        """Return the figures of all chunks."""
        many = max(self.finite, 1)
        a, b = (math.sqrt(total.value) for total in (self.aa, self.bb))
        if a and b:
            # exponents of squares are even
            unit = self.ab.unit - (self.aa.unit + self.bb.unit) // 2
            cosine = min(1.0, max(-1.0, math.ldexp(self.ab.value / a / b, unit)))
        else:
            cosine = 1.0 if a == b else 0.0
        rel_l2 = 0.0
        if self.dd.value:
            unit = (self.dd.unit - self.bb.unit) // 2
            rel_l2 = scale(math.sqrt(self.dd.value) / b, unit) if b else math.inf
        return Figures(
            count, self.finite, self.mismatches, self.nonfinite, self.first_nonfinite, self.worst,
            self.max_abs, scale(self.abs.value / many, self.abs.unit), self.max_rel,
            self.rel.value / many, self.excess, self.factor, cosine, rel_l2, self.ulps, 0,
        )  # fmt: skip


def _unit(sizes: NDArray[Any]) -> int:
    """Return the exponent of two to divide by before squaring."""
    largest = sizes.max()
    return int(np.frexp(largest)[1]) if math.isfinite(largest) else 0


def ordinals(x: NDArray[np.float64], form: FloatFormat) -> NDArray[np.int64]:
    """Return each number's ordinal among the numbers of a format, rounded to the nearest.

    >>> import numpy as np
    >>> ordinals(np.array([1.0, 1.0078125, -0.0]), FloatFormat(8, -126, 3.39e38)).tolist()
    [16256, 16257, 0]
    """
    x = x.astype(np.float64)
    bits = x.view(np.int64)
    size = bits & np.int64(0x7FFFFFFFFFFFFFFF)
    if form.digits < 53:
        shift = np.int64(53 - form.digits)
        base = np.int64((form.least_exponent - 1 + 1023) << (form.digits - 1))
        half = (np.int64(1) << (shift - np.int64(1))) - np.int64(1)
        normal = ((size + half + ((size >> shift) & np.int64(1))) >> shift) - base
        scale = 2.0 ** (form.digits - 1 - form.least_exponent)
        small = np.rint(np.minimum(np.abs(x) * scale, 2.0**53)).astype(np.int64)
        size = np.where(np.abs(x) < 2.0**form.least_exponent, small, normal)
        if x.size != 1 or form.largest != x[0]:
            last = int(ordinals(np.array([form.largest]), form)[0])
            size = np.minimum(size, last + 1)
    found: NDArray[np.int64] = np.where(bits < 0, -size, size)
    return found
