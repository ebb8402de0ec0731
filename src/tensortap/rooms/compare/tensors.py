"""Compare two arrays with the C kernel, and describe the result.

Two numbers are close if ``|a - b| <= atol + rtol*|b|`` in float64, on their exact difference.
Integers must be equal, unless the user gives a tolerance; bools must be equal. Of complex numbers,
real and imaginary parts are compared.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.dtypes import DTYPES, FloatFormat
from tensortap.core.errors import TensortapError
from tensortap.rooms.compare.result import Comparison
from tensortap.stats.conversion import complex_part, is_number, real_and_imag
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
    excess: float  # largest |a - b| - rtol*|b| among pairs that differ
    factor: float  # largest (|a - b| - atol) / |b|, or 0
    cosine: float
    rel_l2: float
    ulps: int
    identical: int  # true if all bytes are the same


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
    if kernel is None:
        raise TensortapError(
            "comparing arrays needs the C kernel: install tensortap with a compiler, or a wheel"
        )
    form = tuple(coarser(a.dtype, b.dtype))
    sides = [
        (x.__array_interface__["data"][0], kernel_code(x.dtype), x.strides)
        for x in (a, b) if x.dtype.isnative
    ]  # fmt: skip
    if len(sides) < 2 or None in (sides[0][1], sides[1][1]):  # other byte orders, longdouble
        a, b = (x.astype(np.float64 if x.dtype.itemsize > 8 else x.dtype.newbyteorder("="))
                for x in (a, b))  # fmt: skip
        return compare_arrays(a, b, atol=atol, rtol=rtol, equal_nan=equal_nan, threads=threads)
    return Figures(*kernel.compare(*sides, a.shape, atol, rtol, equal_nan, form, threads))


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
    known = [form for form in (format_of(a), format_of(b)) if form.digits]
    return min(known, key=lambda form: (form.digits, -form.least_exponent), default=NO_FORMAT)


def nudged(value: float) -> float:
    """Return a slightly larger value, so that rounding does not make a tolerance too small."""
    return math.nextafter(math.nextafter(value * (1 + 2**-51), math.inf), math.inf)


class Tolerance(NamedTuple):
    """The tolerance of a comparison, how to treat NaN, and how many threads to use."""

    atol: float = 1e-8
    rtol: float = 1e-5
    equal_nan: bool = True
    threads: int = 0  # as many as help
    whole_atol: float = 0.0  # of integers
    whole_rtol: float = 0.0

    def given(self, atol: float | None, rtol: float | None) -> Tolerance:
        """Return the tolerance with what the user gives, which holds for integers as well."""
        found = self
        if atol is not None:
            found = found._replace(atol=float(atol), whole_atol=float(atol))
        if rtol is not None:
            found = found._replace(rtol=float(rtol), whole_rtol=float(rtol))
        return found


def check_tolerance(atol: float | None, rtol: float | None) -> None:
    """Raise ValueError for an invalid tolerance; None stands for the default."""
    for name, tolerance in (("atol", atol), ("rtol", rtol)):
        if tolerance is not None and not 0 <= tolerance < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {tolerance!r}")


def compare_tensors(
    a: NDArray[Any], b: NDArray[Any], rules: Tolerance, path: str = ""
) -> Comparison:
    """Compare two arrays element by element."""
    dtypes = str(a.dtype), str(b.dtype)
    shapes = a.shape, b.shape
    notes = (f"{dtypes[0]} and {dtypes[1]}",) if dtypes[0] != dtypes[1] else ()
    known: dict[str, Any] = {"path": path, "notes": notes, "shapes": shapes, "dtypes": dtypes}
    if a.shape != b.shape:
        reason = f"shapes {list(a.shape)} and {list(b.shape)}"
        return Comparison(False, reason, differing=1, **known)
    if a.dtype.kind == b.dtype.kind == "b":
        rules = rules._replace(atol=0.0, rtol=0.0)
    elif is_whole(a.dtype) and is_whole(b.dtype):
        rules = rules._replace(atol=rules.whole_atol, rtol=rules.whole_rtol)
    x, y = a, b
    if any(complex_part(each.dtype) is not None for each in (a, b)):
        x, y = _parts(a), _parts(b)
    axes = _memory_order(x, y)
    found = compare_arrays(
        x.transpose(axes), y.transpose(axes), atol=rules.atol, rtol=rules.rtol,
        equal_nan=rules.equal_nan, threads=rules.threads,
    )  # fmt: skip
    return _comparison(a, b, found, axes, rules, known)


def _parts(array: NDArray[Any]) -> NDArray[Any]:
    """Return the real and imaginary parts of numbers along a new last axis."""
    is_complex = complex_part(array.dtype) is not None
    return np.stack(real_and_imag(array) if is_complex else (array, np.zeros_like(array)), -1)


def _memory_order(a: NDArray[Any], b: NDArray[Any]) -> list[int]:
    """Return the axes by decreasing stride."""
    if a.flags.c_contiguous and b.flags.c_contiguous:
        return list(range(a.ndim))
    reach = [(-abs(s), -abs(t)) for s, t in zip(a.strides, b.strides, strict=True)]
    return sorted(range(a.ndim), key=lambda axis: reach[axis])


def _comparison(
    a: NDArray[Any],
    b: NDArray[Any],
    found: Figures,
    axes: list[int],
    rules: Tolerance,
    known: dict[str, Any],
) -> Comparison:
    at = found.first_nonfinite if found.first_nonfinite >= 0 else found.worst
    worst = values = None
    is_complex = len(axes) > a.ndim
    if at >= 0:
        worst = _index(at, (*a.shape, 2) if is_complex else a.shape, axes)[: a.ndim]
        values = _item(a, worst), _item(b, worst)
    atol: float | None = max(found.excess, 0.0)
    rtol: float | None = nudged(found.factor) if found.factor else 0.0
    if atol and rules.rtol:
        atol = nudged(atol)
    if found.nonfinite or (a.dtype.kind == b.dtype.kind == "b" and found.mismatches):
        atol = rtol = None
    reason = ""
    if found.mismatches:
        elements = "real and imaginary parts" if is_complex else "elements"
        reason = f"{found.mismatches:,} of {found.pairs:,} {elements}"
        if a.ndim == 0:
            reason = "numbers"
        if found.nonfinite:
            reason += f", {found.nonfinite:,} not finite"
    same = {name: getattr(found, name) for name in _SAME_FIGURES}
    return Comparison(
        not found.mismatches, reason, count=found.pairs, worst=worst, values=values,
        ulps=found.ulps if coarser(a.dtype, b.dtype).digits else None,
        passing_atol=atol if atol is not None and math.isfinite(atol) else None,
        passing_rtol=rtol if rtol is not None and math.isfinite(rtol) else None,
        differing=int(found.mismatches > 0), **same, **known,
    )  # fmt: skip


_SAME_FIGURES = (
    "finite", "mismatches", "nonfinite", "max_abs", "mean_abs", "max_rel", "mean_rel", "rel_l2",
    "cosine",
)  # fmt: skip


def _index(at: int, shape: tuple[int, ...], axes: list[int]) -> tuple[int, ...]:
    """Return the index of an element from its flat position in the order of `axes`."""
    index = [0] * len(shape)
    for axis in reversed(axes):
        at, index[axis] = divmod(at, shape[axis])
    return tuple(index)


def _item(array: NDArray[Any], index: tuple[int, ...]) -> Any:
    """Return an element as a Python number if it fits."""
    item = array[index]
    if is_whole(array.dtype):
        return bool(item) if array.dtype.kind == "b" else int(item)
    if array.dtype.kind == "c":
        return item.item()
    if is_number(array.dtype) and array.dtype.fields is None and array.dtype.itemsize <= 8:
        try:
            return float(item)
        except TypeError:  # complex32
            return complex(item)
    return item
