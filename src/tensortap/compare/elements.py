"""Compare two arrays element by element: with the C kernel if it was built, else with NumPy.

Two numbers are close if ``|a - b| <= atol + rtol*|b|`` in float64, on their exact difference.
Integers and bools must be equal.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.dtypes import DTYPES, FloatFormat
from tensortap.stats.conversion import complex_part
from tensortap.stats.summarize import kernel, kernel_code

NO_FORMAT = FloatFormat(0, 0, 0.0)


class Figures(NamedTuple):
    """The figures of two arrays; indices are flat, -1 for none."""

    pairs: int
    finite: int
    mismatches: int
    nonfinite: int
    first_nonfinite: int
    worst: int
    max_abs: float
    mean_abs: float
    max_rel: float
    mean_rel: float
    excess: float
    """Largest ``|a - b| - rtol*|b|`` among pairs that differ."""
    factor: float
    """Largest ``(|a - b| - atol) / |b|``, or 0."""
    cosine: float
    rel_l2: float
    ulps: int
    identical: int
    """True if all bytes are the same."""


def compare_arrays(
    a: NDArray[Any],
    b: NDArray[Any],
    *,
    atol: float,
    rtol: float,
    equal_nan: bool,
    threads: int = 0,
) -> Figures:
    """Return the figures of two arrays of numbers with the same shape.

    >>> import numpy as np
    >>> x = np.array([1.0, 2.0, 4.0])
    >>> found = compare_arrays(x, x * 1.5, atol=0.0, rtol=0.1, equal_nan=True)
    >>> found.mismatches, found.worst, found.max_abs
    (3, 2, 2.0)
    """
    form = coarser(a.dtype, b.dtype)
    codes = _code_of(a.dtype), _code_of(b.dtype)
    if None not in codes:
        sides = [
            (array.__array_interface__["data"][0], code, array.strides)
            for array, code in zip((a, b), codes, strict=True)
        ]
        return Figures(
            *kernel.compare(*sides, a.shape, atol, rtol, equal_nan, tuple(form), threads)
        )
    from tensortap.compare import chunks

    return chunks.compare_arrays(a, b, atol, rtol, equal_nan, form)


@functools.cache
def _code_of(dtype: np.dtype[Any]) -> int | None:
    return None if complex_part(dtype) is not None else kernel_code(dtype)


@functools.cache
def is_whole(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype holds integers or bools."""
    row = DTYPES.get(dtype.name)
    return row is not None and row.is_integer


@functools.cache
def format_of(dtype: np.dtype[Any]) -> FloatFormat:
    """Return the floating-point format of a dtype, or of its complex parts."""
    row = DTYPES.get((complex_part(dtype) or dtype).name)
    return NO_FORMAT if row is None or row.format is None else row.format


@functools.cache
def coarser(a: np.dtype[Any], b: np.dtype[Any]) -> FloatFormat:
    """Return the coarser of two formats: fewer digits, or else the smaller range."""
    if any((complex_part(each) or each).itemsize > 8 for each in (a, b)):
        return NO_FORMAT  # float64 cannot measure units of longdouble
    known = [form for form in (format_of(a), format_of(b)) if form.digits]
    return min(known, key=lambda form: (form.digits, -form.least_exponent), default=NO_FORMAT)


def nudged(value: float) -> float:
    """Return a slightly larger value, so that rounding does not make a tolerance too small."""
    return math.nextafter(math.nextafter(value * (1 + 2**-51), math.inf), math.inf)
