"""Explain why two arrays differ, by cheap hypotheses that are named only if they hold.

A hypothesis must hold for every element, remove almost all of the difference, and be supported by
more evidence than chance would give. How often two elements of the data agree at random says how
much evidence one agreement is. Constant and tiny arrays give no evidence. A hypothesis that fails
on a sample of a few thousand elements is not tested further.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.dtypes import numpy_dtype
from tensortap.rooms.compare.tensors import coarser, compare_arrays, format_of, is_whole
from tensortap.stats.conversion import as_float64, complex_part, is_number
from tensortap.values.view import array_of

Array = NDArray[Any]

_SAMPLE = 4096
_CHUNK = 1 << 16
_BITS = 24.0  # bits of evidence: chance would give it once in 16 million
_REST = 0.02  # share of the difference that a hypothesis may leave
_ROUNDED = (
    "float32", "float16", "bfloat16", "float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Explanation:
    """A hypothesis that holds."""

    kind: str  # "zero", "sign", "factor", "transposed" or "rounded"
    text: str  # in words: "a is b with its axes in the order (1, 0)"
    details: dict[str, Any] = field(default_factory=dict)  # factor, axes, dtypes, side

    def __str__(self) -> str:
        return self.text


def explain(a: Any, b: Any, *, atol: float = 1e-8, rtol: float = 1e-5) -> tuple[Explanation, ...]:
    """Return all simple reasons that explain why two tensors differ.

    >>> import numpy as np
    >>> x = np.random.default_rng(0).standard_normal((4, 8))
    >>> [str(found) for found in explain(x, x / 8)]
    ['a is 8 times b']
    """
    x, y = array_of(a), array_of(b)
    if x is None or y is None or not _fit(x) or not _fit(y):
        return ()
    # relative to their own precision: a factor of three rounds in bfloat16
    digits = coarser(x.dtype, y.dtype).digits or 53
    near = max(rtol, 2.0 ** (1 - digits))
    with np.errstate(all="ignore"):
        found = list(_transposed(x, y, near))
        if x.shape != y.shape:
            return tuple(found)
        if compare_arrays(x, y, atol=atol, rtol=rtol, equal_nan=True).mismatches == 0:
            return ()
        found = [*_zero(x, y), *_factor(x, y, near), *found, *_rounded(x, y)]
    return tuple(found)


def _fit(array: Array) -> bool:
    return array.size > 1 and is_number(array.dtype) and complex_part(array.dtype) is None


# ---- evidence ----


def _sampled(*arrays: Array) -> Iterator[NDArray[np.float64]]:
    """Yield the same sample of elements of arrays of one shape; all of them if they are few."""
    size = arrays[0].size
    chosen = np.arange(size)
    if size > _SAMPLE:
        chosen = np.random.default_rng(0).integers(0, size, _SAMPLE)
    at = np.unravel_index(chosen, arrays[0].shape)
    yield from (as_float64(each[at]) for each in arrays)


def _close(x: NDArray[np.float64], y: NDArray[np.float64], rtol: float) -> NDArray[np.bool_]:
    near = np.abs(x - y) <= rtol * np.maximum(np.abs(x), np.abs(y))
    found: NDArray[np.bool_] = near | (x == y) | (np.isnan(x) & np.isnan(y))
    return found


def _bits(values: NDArray[np.float64], rtol: float) -> float:
    """Return the bits of evidence in one agreement; fewer the more alike the elements are."""
    rng = np.random.default_rng(1)
    one, other = rng.permutation(values.size), rng.permutation(values.size)
    one, other = one[one != other], other[one != other]
    if not one.size:
        return 0.0
    alike = int(np.count_nonzero(_close(values[one], values[other], rtol)))
    return -math.log2((alike + 1) / (one.size + 1))


def _is_evident(
    one: NDArray[np.float64],
    other: NDArray[np.float64],
    plain: NDArray[np.float64],
    rtol: float,
    free: int = 0,
) -> bool:
    """Return whether `one` agrees with `other` beyond chance where it does not with `plain`.

    `free` is the number of elements from which the hypothesis was derived.
    """
    if not _close(one, other, rtol).all():
        return False
    telling = int(np.count_nonzero(~_close(one, plain, rtol))) - free
    if telling * _bits(other, rtol) < _BITS:
        return False
    good = np.isfinite(one) & np.isfinite(other) & np.isfinite(plain)
    rest, whole = np.abs(one - other)[good].sum(), np.abs(one - plain)[good].sum()
    # differences that are not finite have no sum
    return bool(rest <= _REST * whole)


def _is_supported(one: Array, other: Array, plain: Array, rtol: float) -> bool:
    """Return whether `one` is `other`, with evidence from a sample first, then everywhere."""
    x, y, z = _sampled(one, other, plain)
    if not _is_evident(x, y, z, rtol):
        return False
    whole = is_whole(one.dtype) and is_whole(other.dtype)
    found = compare_arrays(one, other, atol=0.0, rtol=0.0 if whole else rtol, equal_nan=True)
    return found.mismatches == 0


def _chunks(*arrays: Array) -> Iterator[list[Array]]:
    flat: list[Any] = [x.reshape(-1) if x.flags.c_contiguous else x.flat for x in arrays]
    for start in range(0, arrays[0].size, _CHUNK):
        yield [np.ascontiguousarray(each[start : start + _CHUNK]) for each in flat]


# ---- hypotheses ----


def _zero(x: Array, y: Array) -> Iterator[Explanation]:
    some = [any(bool((as_float64(p) != 0).any()) for (p,) in _chunks(each)) for each in (x, y)]
    if some[0] != some[1]:
        side = "b" if some[0] else "a"
        yield Explanation("zero", f"{side} is all zeros", {"side": side})


def _factor(x: Array, y: Array, rtol: float) -> Iterator[Explanation]:
    one, other = _sampled(x, y)
    ratios = (one / other)[(other != 0) & np.isfinite(one / other)]
    factor = _simple(float(np.median(ratios)), rtol) if ratios.size else 0.0
    if factor in (0.0, 1.0) or not _is_evident(one, factor * other, other, rtol, free=1):
        return
    for p, q in _chunks(x, y):
        if not _close(as_float64(p), factor * as_float64(q), rtol).all():
            return
    if factor == -1.0:
        yield Explanation("sign", "a is b with its sign flipped", {"factor": -1.0})
    else:
        yield Explanation("factor", f"a is {_spelled(factor)} times b", {"factor": factor})


def _simple(factor: float, rtol: float) -> float:
    """Return the integer, or its inverse, that a factor is close to; else the factor."""
    over = 1 / factor if factor else 0.0
    if not math.isfinite(factor) or not math.isfinite(over):
        return 0.0
    for candidate in (round(factor), 1 / round(over) if round(over) else 0.0):
        if candidate and abs(candidate - factor) <= rtol * abs(factor):
            return float(candidate)
    return factor


def _spelled(factor: float) -> str:
    if factor == int(factor):
        return f"{int(factor)}"
    over = 1 / factor
    if abs(over - round(over)) < 1e-9 * abs(over):
        return f"1/{round(over)}" if over > 0 else f"-1/{-round(over)}"
    square = over * over
    if 2 <= square < 1e6 and abs(square - round(square)) < 1e-4 * square:
        return f"{'-' if factor < 0 else ''}1/√{round(square)} ({factor:.6g})"
    return f"{factor:.6g}"


def _transposed(x: Array, y: Array, rtol: float) -> Iterator[Explanation]:
    if not 2 <= x.ndim <= 4 or x.ndim != y.ndim or sorted(x.shape) != sorted(y.shape):
        return
    plain = y.reshape(x.shape)  # the same order in memory: reshaped instead of transposed
    seen = set()
    for axes in itertools.permutations(range(x.ndim)):
        turned = y.transpose(axes)
        # moving axes of length 1 gives the same array
        order = tuple(axis for axis in axes if y.shape[axis] > 1)
        if turned.shape != x.shape or order in seen:
            continue
        seen.add(order)
        if order != tuple(sorted(order)) and _is_supported(x, turned, plain, rtol):
            text = f"a is b with its axes in the order {axes}"
            yield Explanation("transposed", text, {"axes": axes})
            return


def _rounded(x: Array, y: Array) -> Iterator[Explanation]:
    if is_whole(x.dtype) or is_whole(y.dtype):
        return
    for side, whole, one, other in (("a", "b", x, y), ("b", "a", y, x)):
        fits = [
            name for name in _ROUNDED
            if format_of(numpy_dtype(name)).digits < format_of(other.dtype).digits
            and _is_rounded(one, other, numpy_dtype(name))
        ]  # fmt: skip
        if fits:
            text = f"{side} is {whole} rounded to {' or '.join(fits)}"
            yield Explanation("rounded", text, {"side": side, "dtypes": tuple(fits)})


def _is_rounded(one: Array, other: Array, dtype: np.dtype[Any]) -> bool:
    """Return whether `one` is exactly `other` rounded to a coarser dtype, beyond chance."""
    telling = 0
    kinds: set[float] = set()
    for p, q in _chunks(one, other):
        rounded, value = as_float64(q.astype(dtype)), as_float64(p)
        if not ((rounded == value) | (np.isnan(rounded) & np.isnan(value))).all():
            return False
        changed = (value != as_float64(q)) & np.isfinite(value) & (value != 0)
        telling += int(np.count_nonzero(changed))
        if len(kinds) < 64:
            kinds.update(np.unique(value[changed])[:64].tolist())
    # each could have been any of 2**spare numbers, or at least a neighbor
    spare = format_of(one.dtype).digits - format_of(dtype).digits
    return len(kinds) >= 4 and min(telling, 4 * len(kinds)) * max(spare, 1.5) >= _BITS
