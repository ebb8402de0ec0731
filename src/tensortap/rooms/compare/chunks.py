"""Compare two arrays in chunks with NumPy, for what the C kernel does not cover.

Counts and maxima equal those of the kernel bit for bit; sums are added in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    tally = _ChunkTotals(atol, rtol, equal_nan, form)
    with np.errstate(all="ignore"):
        for start, x, y in _pairs(a, b):
            tally.add(start, x, y)
        return tally.figures(a.size)


def _pairs(a: NDArray[Any], b: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
    for start in range(0, a.size, _CHUNK):
        stop = min(start + _CHUNK, a.size)
        yield start, _part(a, start, stop), _part(b, start, stop)


def _part(array: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
    flat: Any = array.reshape(-1) if array.flags.c_contiguous else array.flat
    part = np.ascontiguousarray(flat[start:stop])
    return part.astype(part.dtype.newbyteorder("="), copy=False)


class _Numbers:
    """A chunk as real parts and, if complex, imaginary parts; `rest` is what float64 cannot hold.

    For longdouble all of them are longdouble.
    """

    def __init__(self, chunk: NDArray[Any]) -> None:
        self.rest: NDArray[Any] | None = None
        self.imag: NDArray[Any] | None = None
        if complex_part(chunk.dtype) is not None:
            self.real, self.imag = map(_real, real_and_imag(chunk))
            return
        self.real = _real(chunk)
        if is_whole(chunk.dtype) and chunk.dtype.itemsize == 8:
            # integers up to 64 bits, which longdouble may not hold either
            top = self.real >= 2.0 ** (64 if chunk.dtype.kind == "u" else 63)
            back = np.where(top, 0.0, self.real).astype(chunk.dtype)
            rest = (chunk - back).view(np.int64).astype(np.float64)
            below = -(np.iinfo(chunk.dtype).max - chunk).astype(np.float64) - 1.0
            self.rest = np.where(top, below, rest)


def _real(chunk: NDArray[Any]) -> NDArray[Any]:
    if chunk.dtype.kind == "f" and chunk.dtype.itemsize > 8:
        return chunk
    return as_float64(chunk)


def _less(x: NDArray[Any] | None, y: NDArray[Any] | None) -> Any:
    """Return the difference of two arrays, either of which may be the number 0."""
    if x is None or y is None:
        return x if y is None else -y
    return x - y


class _Sum:
    """A sum of squares or products, scaled by a power of two to stay within float64."""

    def __init__(self) -> None:
        self.value = 0.0
        self.unit = 0

    def add(self, value: Any, unit: int) -> None:
        value = float(value)
        if value == 0.0:
            return
        if self.value == 0.0:
            self.value, self.unit = value, unit
            return
        top = max(self.unit, unit)
        self.value = math.ldexp(self.value, self.unit - top) + math.ldexp(value, unit - top)
        self.unit = top


class _ChunkTotals:
    def __init__(self, atol: float, rtol: float, equal_nan: bool, form: FloatFormat) -> None:
        self.atol, self.rtol, self.equal_nan, self.form = atol, rtol, equal_nan, form
        self.finite = self.mismatches = self.nonfinite = 0
        self.first_nonfinite = self.worst = -1
        self.max_abs = self.max_rel = self.factor = 0.0
        self.excess = -math.inf
        self.steps = 0
        self.abs, self.rel = _Sum(), _Sum()
        self.dd, self.aa, self.bb, self.ab = _Sum(), _Sum(), _Sum(), _Sum()

    def add(self, start: int, a: NDArray[Any], b: NDArray[Any]) -> None:
        x, y = _Numbers(a), _Numbers(b)
        self._sift(start, x, y)
        real = _less(x.real, y.real)
        rest = _less(x.rest, y.rest)
        if rest is not None:
            real = real + rest
        imag = _less(x.imag, y.imag)
        d = _magnitude(real, imag)
        size = _magnitude(y.real, y.imag)
        allowed = self.rtol * size
        self.mismatches += int(np.count_nonzero(d > self.atol + allowed))
        ratio = np.where(d > 0, d / size, 0.0)
        self._maxima(start, d, size, ratio, allowed)
        self._steps(x, y)

        unit = _unit(d)
        self.abs.add(np.ldexp(d, -unit).sum(), unit)
        self.rel.add(ratio.sum(), 0)
        units = [_unit(_magnitude(each.real, each.imag)) for each in (x, y)]
        self.dd.add(np.square(np.ldexp(d, -unit)).sum(), 2 * unit)
        for total, p, q, at in (
            (self.aa, x, x, 2 * units[0]),
            (self.bb, y, y, 2 * units[1]),
            (self.ab, x, y, units[0] + units[1]),
        ):
            first, second = (units[0] if each is x else units[1] for each in (p, q))
            product = np.ldexp(p.real, -first) * np.ldexp(q.real, -second)
            if p.imag is not None and q.imag is not None:
                product = product + np.ldexp(p.imag, -first) * np.ldexp(q.imag, -second)
            total.add(product.sum(), at)

    def _sift(self, start: int, x: _Numbers, y: _Numbers) -> None:
        """Judge the pairs in which one value is not finite, then set both to zero."""
        each = [n for n in (x.real, x.imag, y.real, y.imag) if n is not None]
        finite = np.logical_and.reduce([np.isfinite(n) for n in each])
        self.finite += int(np.count_nonzero(finite))
        if finite.all():
            return
        nans = [
            np.isnan(n.real) if n.imag is None else np.isnan(n.real) | np.isnan(n.imag)
            for n in (x, y)
        ]
        zero = np.zeros_like(x.real)
        same = (x.real == y.real) & (
            (zero if x.imag is None else x.imag) == (zero if y.imag is None else y.imag)
        )
        equal = np.where(nans[0] | nans[1], nans[0] & nans[1] & self.equal_nan, same)
        unequal = np.flatnonzero(~finite & ~equal)
        self.nonfinite += unequal.size
        self.mismatches += unequal.size
        if unequal.size and self.first_nonfinite < 0:
            self.first_nonfinite = start + int(unequal[0])
        for numbers in (x, y):
            numbers.real = np.where(finite, numbers.real, 0.0)
            if numbers.imag is not None:
                numbers.imag = np.where(finite, numbers.imag, 0.0)
            if numbers.rest is not None:
                numbers.rest = np.where(finite, numbers.rest, 0.0)

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

    def _steps(self, x: _Numbers, y: _Numbers) -> None:
        if not self.form.digits:
            return
        zero = np.zeros_like(x.real)
        pairs = [(x.real, y.real)]
        if x.imag is not None or y.imag is not None:
            pairs.append((zero if x.imag is None else x.imag, zero if y.imag is None else y.imag))
        for p, q in pairs:
            first, second = ordinals(p, self.form), ordinals(q, self.form)
            # unsigned, so that no difference overflows
            apart = np.where(
                first > second,
                first.view(np.uint64) - second.view(np.uint64),
                second.view(np.uint64) - first.view(np.uint64),
            )
            self.steps = max(self.steps, int(apart.max()))

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
            self.rel.value / many, self.excess, self.factor, cosine, rel_l2, self.steps, 0,
        )  # fmt: skip


def _magnitude(real: Any, imag: Any) -> Any:
    return np.abs(real) if imag is None else np.hypot(real, imag)


def _unit(sizes: NDArray[Any]) -> int:
    """Return the exponent of two to divide by before squaring."""
    largest = sizes.max()
    if not largest or not math.isfinite(largest):
        return 0
    return int(np.frexp(largest)[1])


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
