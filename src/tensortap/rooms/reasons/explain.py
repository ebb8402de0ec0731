"""Explain why two tensors differ, by cheap hypotheses that are named only if they hold.

A hypothesis must hold for every element, remove almost all of the difference, and be supported by
more evidence than chance would give. How often two elements of the data agree at random says how
much evidence one agreement is. Constant and tiny arrays give no evidence. A hypothesis that fails
on a sample of a few thousand elements is not tested further.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.dtypes import numpy_dtype
from tensortap.rooms.compare.tensors import coarser, compare_arrays, format_of, is_whole
from tensortap.stats.conversion import as_float64, complex_part, is_number
from tensortap.values.view import array_of

if TYPE_CHECKING:
    from tensortap.rooms.reasons.around import Around

Array = NDArray[Any]
Floats = NDArray[np.float64]

_SAMPLE = 4096
_CHUNK = 1 << 16
_BITS = 24.0  # bits of evidence: chance would give it once in 16 million
_REST = 0.02  # share of the difference that a hypothesis may leave
_ROUNDED = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_SIDES = ((0, "a", "b"), (1, "b", "a"))


class Case(NamedTuple):
    """Two tensors that differ."""

    a: Array
    b: Array
    near: float  # relative to which two numbers are close


def explain(
    a: Any, b: Any, *, atol: float = 1e-8, rtol: float = 1e-5, around: Around | None = None
) -> tuple[str, ...]:
    """Return all simple reasons that explain why two tensors differ.

    `around` has other records of both runs, which are reasons, too.

    >>> import numpy as np
    >>> x = np.random.default_rng(0).standard_normal((4, 8))
    >>> explain(x, x / 8)
    ('a is 8 times b',)
    """
    x, y = array_of(a), array_of(b)
    found: list[str] = []
    with np.errstate(all="ignore"):
        if x is not None and y is not None and _fit(x) and _fit(y):
            # relative to their own precision: a factor of three rounds in bfloat16
            digits = coarser(x.dtype, y.dtype).digits or 53
            case = Case(x, y, max(rtol, 2.0 ** (1 - digits)))
            is_same = x.shape == y.shape
            if (
                is_same
                and not compare_arrays(x, y, atol=atol, rtol=rtol, equal_nan=True).mismatches
            ):
                return ()
            tried = OF_VALUES if is_same else (_transposed,)
            found += itertools.chain.from_iterable(hypothesis(case) for hypothesis in tried)
            if around is not None and is_same:
                found += itertools.chain.from_iterable(each(case, around) for each in OF_MODULES)
        if around is not None:
            found += itertools.chain.from_iterable(each(around) for each in OF_RECORDS)
    return tuple(found)


def _fit(array: Array) -> bool:
    return array.size > 1 and is_number(array.dtype) and complex_part(array.dtype) is None


# ---- evidence ----


def _sampled(*arrays: Array) -> Iterator[Floats]:
    """Yield the same sample of elements of arrays of one shape; all of them if they are few."""
    size = arrays[0].size
    chosen = np.arange(size)
    if size > _SAMPLE:
        chosen = np.random.default_rng(0).integers(0, size, _SAMPLE)
    at = np.unravel_index(chosen, arrays[0].shape)
    yield from (as_float64(each[at]) for each in arrays)


def _close(x: Floats, y: Floats, rtol: float, atol: float = 0.0) -> NDArray[np.bool_]:
    near = np.abs(x - y) <= atol + rtol * np.maximum(np.abs(x), np.abs(y))
    found: NDArray[np.bool_] = near | (x == y) | (np.isnan(x) & np.isnan(y))
    return found


def _bits(values: Floats, rtol: float, atol: float) -> float:
    """Return the bits of evidence in one agreement; fewer the more alike the elements are."""
    rng = np.random.default_rng(1)
    one, other = rng.permutation(values.size), rng.permutation(values.size)
    one, other = one[one != other], other[one != other]
    if not one.size:
        return 0.0
    alike = int(np.count_nonzero(_close(values[one], values[other], rtol, atol)))
    return -math.log2((alike + 1) / (one.size + 1))


def _is_evident(
    one: Floats, other: Floats, plain: Floats, rtol: float, atol: float = 0.0, free: int = 0
) -> bool:
    """Return whether `one` agrees with `other` beyond chance where it does not with `plain`.

    `free` is the number of elements from which the hypothesis was derived.
    """
    if not _close(one, other, rtol, atol).all():
        return False
    telling = int(np.count_nonzero(~_close(one, plain, rtol, atol))) - free
    if telling * _bits(other, rtol, atol) < _BITS:
        return False
    good = np.isfinite(one) & np.isfinite(other) & np.isfinite(plain)
    rest, whole = np.abs(one - other)[good].sum(), np.abs(one - plain)[good].sum()
    # differences that are not finite have no sum
    return bool(rest <= _REST * whole)


def _chunks(*arrays: Array) -> Iterator[list[Array]]:
    flat: list[Any] = [x.reshape(-1) if x.flags.c_contiguous else x.flat for x in arrays]
    for start in range(0, arrays[0].size, _CHUNK):
        yield [np.ascontiguousarray(each[start : start + _CHUNK]) for each in flat]


def _holds(
    case: Case, changed: Callable[[Floats], Floats], atol: float = 0.0, free: int = 1
) -> bool:
    """Return whether `a` is a function of `b`: on a sample first, then everywhere."""
    one, other = _sampled(case.a, case.b)
    return _is_evident(one, changed(other), other, case.near, atol, free) and all(
        _close(as_float64(p), changed(as_float64(q)), case.near, atol).all()
        for p, q in _chunks(case.a, case.b)
    )


# ---- hypotheses about two values ----


def _zero(case: Case) -> Iterator[str]:
    some = [any(bool((as_float64(p) != 0).any()) for (p,) in _chunks(each)) for each in case[:2]]
    if some[0] != some[1]:
        yield f"{'b' if some[0] else 'a'} is all zeros"


def _factor(case: Case) -> Iterator[str]:
    one, other = _sampled(case.a, case.b)
    ratios = (one / other)[(other != 0) & np.isfinite(one / other)]
    factor = _simple(float(np.median(ratios)), case.near) if ratios.size else 0.0
    if factor in (0.0, 1.0) or not _holds(case, lambda values: factor * values):
        return
    if factor == -1.0:
        yield "a is b with its sign flipped"
    else:
        yield f"a is {_spelled(factor)} times b"


def _plus(case: Case) -> Iterator[str]:
    one, other = _sampled(case.a, case.b)
    gaps = (one - other)[np.isfinite(one - other)]
    constant = float(np.median(gaps)) if gaps.size else 0.0
    # what is added is rounded to the precision of the sum
    atol = case.near * abs(constant)
    if constant and _holds(case, lambda values: values + constant, atol):
        yield f"a is b plus {constant:.6g}"


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


def _transposed(case: Case) -> Iterator[str]:
    x, y, rtol = case
    if not 2 <= x.ndim <= 4 or x.ndim != y.ndim or sorted(x.shape) != sorted(y.shape):
        return
    plain = y.reshape(x.shape)  # the same order in memory: reshaped instead of transposed
    whole = is_whole(x.dtype) and is_whole(y.dtype)
    rules: Any = {"atol": 0.0, "rtol": 0.0 if whole else rtol, "equal_nan": True}
    seen = set()
    for axes in itertools.permutations(range(x.ndim)):
        turned = y.transpose(axes)
        # moving axes of length 1 gives the same array
        order = tuple(axis for axis in axes if y.shape[axis] > 1)
        if turned.shape != x.shape or order in seen or order == tuple(sorted(order)):
            continue
        seen.add(order)
        one, other, same = _sampled(x, turned, plain)
        if _is_evident(one, other, same, rtol) and not (
            compare_arrays(x, turned, **rules).mismatches
        ):
            yield f"a is b with its axes in the order {axes}"
            return


def _rounded(case: Case) -> Iterator[str]:
    if is_whole(case.a.dtype) or is_whole(case.b.dtype):
        return
    for side, own, of in _SIDES:
        one, other = (case.a, case.b) if side == 0 else (case.b, case.a)
        fits = [
            name for name in _ROUNDED
            if format_of(numpy_dtype(name)).digits < format_of(other.dtype).digits
            and _is_rounded(one, other, numpy_dtype(name))
        ]  # fmt: skip
        if fits:
            yield f"{own} is {of} rounded to {' or '.join(fits)}"


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


# ---- hypotheses about the module that made two values ----

_erf = np.vectorize(math.erf, otypes=[np.float64])
_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "GELU (tanh)": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "SiLU": lambda x: x / (1 + np.exp(-x)),
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "LeakyReLU": lambda x: np.where(x > 0, x, 0.01 * x),
    "ELU": lambda x: np.where(x > 0, x, np.expm1(x)),
    "Softplus": lambda x: np.logaddexp(0, x),
    "ReLU²": lambda x: np.maximum(x, 0) ** 2,
    "Identity": lambda x: x,
}


def _activation(case: Case, around: Around) -> Iterator[str]:
    for value in around.inputs():
        x, *both = _sampled(value, case.a, case.b)
        names = [
            next((name for name, function in _ACTIVATIONS.items()
                  if _close(each, function(x), case.near, case.near).all()), "")
            for each in both
        ]  # fmt: skip
        if all(names) and names[0] != names[1] and np.unique(x).size > 8:
            yield f"a is {names[0]} of its input, b is {names[1]}"
            return


def _epsilon(case: Case, around: Around) -> Iterator[str]:
    """Tell whether a norm differs in its epsilon.

    Normalized values have the mean square v / (v + eps), where v is the variance of the input: a
    row is scaled by a factor of its own, and from both sides follows the same ratio of epsilons.
    """
    if "norm" not in around.item.a[0].record.type.lower() or case.a.ndim < 2:
        return
    weight, bias = around.parameter("weight", 1.0), around.parameter("bias", 0.0)
    for axes in ((-1,), tuple(i for i in range(case.a.ndim) if i != 1)):  # by row, by channel
        shape = [1] * case.a.ndim
        if axes != (-1,):
            shape[1] = -1
        w, b = (each if axes == (-1,) or not each.ndim else each.reshape(shape)
                for each in (weight, bias))  # fmt: skip
        try:
            x, y = ((as_float64(np.ascontiguousarray(each)) - b) / w for each in case[:2])
        except ValueError:  # parameters of another shape
            continue
        squares = [np.square(each).mean(axes, keepdims=True) for each in (x, y)]
        scale = np.sqrt(squares[0] / squares[1])
        ratio = (1 / squares[0] - 1) / (1 / squares[1] - 1)
        middle = float(np.median(ratio))
        near = 10 * case.near
        if (
            scale.size > 1 and middle > 0 and abs(middle - 1) > 0.05
            and _close(x, scale * y, near, near).all()
            and np.abs(ratio / middle - 1).max() < 0.1
        ):  # fmt: skip
            yield f"a is b with an epsilon {middle:.3g} times as large"
            return


# ---- hypotheses about other records, also of runs that have only statistics ----


def _other_tensor(around: Around) -> Iterator[str]:
    for side, own, other in _SIDES:
        name = around.equal_to(side)
        if name:
            yield f"{own} equals {name} of {other}"


def _stale(around: Around) -> Iterator[str]:
    since = [around.unchanged_since(side) for side in (0, 1)]
    for side, own, other in _SIDES:
        if since[side] is not None and around.has_changed(1 - side):
            yield f"{own} has not changed since step {since[side]}, {other} has"


OF_VALUES = (_zero, _factor, _plus, _transposed, _rounded)
OF_MODULES = (_epsilon, _activation)
OF_RECORDS = (_other_tensor, _stale)
