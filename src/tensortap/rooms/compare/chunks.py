"""Compare two arrays with NumPy, for what the C kernel does not cover: complex numbers, longdouble.

It is also the reference of the kernel: counts and maxima are equal bit for bit; sums are added in
another order.
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


def compare_arrays(
    a: NDArray[Any], b: NDArray[Any], atol: float, rtol: float, equal_nan: bool, form: FloatFormat
) -> Figures:
    """Return the figures of two arrays of numbers with the same shape."""
    with np.errstate(all="ignore"):
        (x, rest_x), (y, rest_y) = (_numbers(_flat(each)) for each in (a, b))
        finite = np.isfinite(x) & np.isfinite(y)
        both_nan = np.isnan(x) & np.isnan(y) & equal_nan
        unequal = np.flatnonzero(~finite & ~both_nan & (x != y))
        common = np.result_type(x, y)
        x, y = (np.where(finite, each, 0).astype(common) for each in (x, y))
        d = np.abs(x - y + np.where(finite, rest_x - rest_y, 0.0))
        size = np.abs(y)
        ratio = np.where(d > 0, d / size, 0.0)
        factors = (d - atol)[d > atol] / size[d > atol]
        excess = np.where(d > 0, d - rtol * size, -np.inf)
        worst = -1
        if d.any():  # if all of them are -inf, the first that differs
            worst = int(excess.argmax() if excess.max() > -math.inf else np.argmax(d > 0))
        mean, norm, unit = _sums(d)
        # complex numbers as pairs: the sum of the products of parts is what a cosine needs
        p, q = (each.view(each.real.dtype) for each in (x, y))
        cosine, of_q, unit_q = _cosine(p, q)
        rel_l2 = 0.0 if not norm else scale(norm / of_q, unit - unit_q) if of_q else math.inf
        many = max(int(finite.sum()), 1)
        return Figures(
            a.size, int(finite.sum()), int((d > atol + rtol * size).sum()) + unequal.size,
            unequal.size, int(unequal[0]) if unequal.size else -1, worst,
            float(d.max(initial=0.0)), scale(mean / many, unit), float(ratio.max(initial=0.0)),
            float(ratio.sum()) / many, float(excess.max(initial=-math.inf)),
            float(factors.max(initial=0.0)), cosine, rel_l2, _ulps(p, q, form), 0,
        )  # fmt: skip


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.astype(flat.dtype.newbyteorder("="), copy=False)


def _numbers(values: NDArray[Any]) -> tuple[NDArray[Any], Any]:
    """Return values as float64, complex128 or wider, and what float64 cannot hold of integers."""
    if complex_part(values.dtype) is not None:
        real, imag = (_numbers(each)[0] for each in real_and_imag(values))
        both = np.empty(real.shape, np.result_type(real, np.complex128))
        both.real, both.imag = real, imag
        return both, 0.0
    if values.dtype.kind == "f" and values.dtype.itemsize > 8:
        return values, 0.0
    found = as_float64(values)
    if not is_whole(values.dtype) or values.dtype.itemsize < 8:
        return found, 0.0
    top = found >= 2.0 ** (64 if values.dtype.kind == "u" else 63)
    back = np.where(top, 0.0, found).astype(values.dtype)
    rest = (values - back).view(np.int64).astype(np.float64)
    below = -(np.iinfo(values.dtype).max - values).astype(np.float64) - 1.0
    return found, np.where(top, below, rest)


def _sums(sizes: NDArray[Any]) -> tuple[float, float, int]:
    """Return sum and norm, and the exponent of two by which both are to be multiplied."""
    largest = sizes.max(initial=0.0)
    # scaled, so that squares stay within float64
    unit = int(np.frexp(largest)[1]) if math.isfinite(largest) else 0
    scaled = np.ldexp(sizes, -unit)
    return float(scaled.sum()), math.sqrt(np.square(scaled).sum()), unit


def _cosine(p: NDArray[Any], q: NDArray[Any]) -> tuple[float, float, int]:
    """Return the cosine, and the norm of `q` with its unit."""
    (_, norm_p, unit_p), (_, norm_q, unit_q) = (_sums(np.abs(each)) for each in (p, q))
    if not (norm_p and norm_q):
        return float(norm_p == norm_q), norm_q, unit_q
    products = np.ldexp(p, -unit_p) * np.ldexp(q, -unit_q)
    return min(1.0, max(-1.0, float(products.sum()) / norm_p / norm_q)), norm_q, unit_q


def _ulps(p: NDArray[Any], q: NDArray[Any], form: FloatFormat) -> int:
    if not form.digits:
        return 0
    one, other = (ordinals(each, form) for each in (p, q))
    # unsigned, so that no difference overflows
    apart = np.maximum(one, other).view(np.uint64) - np.minimum(one, other).view(np.uint64)
    return int(apart.max(initial=0))


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
