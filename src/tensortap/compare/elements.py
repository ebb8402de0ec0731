"""Two arrays, element by element: by the C kernel where it was built, else by NumPy.

What is close: ``|a - b| <= atol + rtol*|b|`` in float64, of the exact difference of the numbers.
Between integers (and bools) nothing is close but what is equal.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.dtypes import DTYPES, FloatFormat, float_format
from tensortap.stats.values import parts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

kernel: Any
try:
    from tensortap.compare import _kernel  # type: ignore[attr-defined]

    kernel = _kernel
except ImportError:  # no compiler when it was installed
    kernel = None

AUTO = 0
"""As many threads as the process may use, eight at most, and only where they are worth it."""


NO_FORMAT = FloatFormat(0, 0, 0.0)


class Figures(NamedTuple):
    """What is found of two arrays; indices are flat, -1 for none."""

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
    """The largest ``|a - b| - rtol*|b|`` of pairs that differ."""
    factor: float
    """The largest ``(|a - b| - atol) / |b|``, or 0."""
    cosine: float
    rel_l2: float
    ulps: int
    identical: int
    """Whether it was all the same bytes."""


def compare_arrays(
    a: NDArray[Any],
    b: NDArray[Any],
    *,
    atol: float,
    rtol: float,
    equal_nan: bool,
    threads: int = AUTO,
) -> Figures:
    """The figures of two arrays of numbers and of one shape.

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
def is_whole(dtype: np.dtype[Any]) -> bool:
    """Whether these are integers or bools."""
    row = DTYPES.get(dtype.name)
    return row is not None and row.is_integer


@functools.cache
def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether these are numbers at all."""
    import numpy as np

    if dtype.kind in "biufc" or parts(dtype) is not None:
        return True
    return dtype.kind in "VW" and dtype.type is not np.void


@functools.cache
def format_of(dtype: np.dtype[Any]) -> FloatFormat:
    """The floating-point format of a dtype, or of the parts of its complex numbers."""
    return float_format((parts(dtype) or dtype).name) or NO_FORMAT


@functools.cache
def coarser(a: np.dtype[Any], b: np.dtype[Any]) -> FloatFormat:
    """The format of two that has fewer digits, or else the smaller range; that of the float."""
    if any((parts(each) or each).itemsize > 8 for each in (a, b)):
        return NO_FORMAT  # longdouble has no format that float64 could be a ruler for
    known = [form for form in (format_of(a), format_of(b)) if form.digits]
    return min(known, key=lambda form: (form.digits, -form.least_exponent), default=NO_FORMAT)


@functools.cache
def _code_of(dtype: np.dtype[Any]) -> int | None:
    """What the kernel calls a dtype; None if it can't, or if there is no kernel."""
    if kernel is None or not dtype.isnative or dtype.fields is not None or not is_number(dtype):
        return None
    known = getattr(kernel, dtype.name.upper(), None)
    if isinstance(known, int):
        return known
    if dtype.itemsize != 1:
        return None
    from tensortap.stats.numpy_summary import pattern_values

    code: int = kernel.add_table(pattern_values(dtype).tobytes())
    return code


def nudged(value: float) -> float:
    """A little more: what was rounded when a tolerance was found must not be missing from it."""
    return math.nextafter(math.nextafter(value * (1 + 2**-51), math.inf), math.inf)
