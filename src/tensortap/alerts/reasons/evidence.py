"""Small histograms of the inputs and outputs of an operation, with the bad elements marked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensortap.alerts.explanation import BadElement, OperandSummary
from tensortap.alerts.reasons.operands import Array, Operands
from tensortap.alerts.reasons.why import first_bad, floats, is_elementwise, operands_of, selected
from tensortap.frameworks.operations import Operation

_BINS = 24
_OPERANDS = 8  # inputs that are kept
_ELEMENTS = 8  # bad elements that are listed

Mask = NDArray[np.bool_]


def evidence_of(
    operation: Operation,
) -> tuple[tuple[OperandSummary, ...], int, tuple[BadElement, ...]]:
    """Return the operands, the number of bad elements, and the first of these.

    An element of an input is marked if a bad element of the output was made of it. Of operations
    for which that cannot be told, only NaN and infinities are counted.
    """
    bad = first_bad(operation)
    operands = operands_of(operation, bad)
    inputs, _ = selected(operation, bad)
    inputs = inputs[:_OPERANDS]
    output = operation.outputs[bad]
    made = floats(output.array())
    arrays = [operands.arrays.get(each.name.partition("[")[0]) for each in inputs]
    wrong = None if made is None else ~np.isfinite(made)
    masks = [None] * len(arrays) if wrong is None else _marks(operands, arrays, wrong)
    found = [
        _summary(each.name, False, each.dtype, each.shape, array, mask)
        for each, array, mask in zip(inputs, arrays, masks, strict=True)
    ]
    found.append(_summary("output" + output.path, True, output.dtype, output.shape, made, None))
    if made is None or wrong is None:
        return tuple(found), 0, ()
    total = int(wrong.sum())
    same_place = is_elementwise(operands.name)
    listed = _elements(arrays if same_place else [None] * len(arrays), made, wrong)
    return tuple(found), total, listed


def _summary(
    name: str,
    is_output: bool,
    dtype: str,
    shape: tuple[int, ...],
    array: Array | None,
    mask: Mask | None,
) -> OperandSummary:
    if array is None:
        return OperandSummary(name, is_output, dtype, shape)
    finite = np.isfinite(array)
    nans, above = int(np.isnan(array).sum()), int(np.isposinf(array).sum())
    below = array.size - int(finite.sum()) - nans - above
    facts = (array.size, nans, above, below)
    if not finite.any():
        return OperandSummary(name, is_output, dtype, shape, *facts)
    low, high = float(array[finite].min()), float(array[finite].max())
    counts = _counts(array[finite], low, high)
    marked = () if mask is None else _counts(array[finite & mask], low, high)
    return OperandSummary(name, is_output, dtype, shape, *facts, low, high, counts, marked)


def _counts(values: Array, low: float, high: float) -> tuple[int, ...]:
    # in halves: the range of float64 is wider than float64
    width = high / 2 - low / 2
    share = (values / 2 - low / 2) / width if width else np.zeros(values.shape)
    where = np.minimum((share * _BINS).astype(np.int64), _BINS - 1)
    return tuple(np.bincount(where, minlength=_BINS).tolist())


def _marks(
    operands: Operands, arrays: Sequence[Array | None], wrong: Mask
) -> Sequence[Mask | None]:
    """Return of each input which elements a bad element of the output was made of."""
    if is_elementwise(operands.name):
        return [_reduced(wrong, x) for x in arrays]
    if operands.name in ("mm", "bmm", "addmm", "baddbmm"):
        *terms, left, right = arrays
        rows, columns = wrong.any(-1, keepdims=True), wrong.any(-2, keepdims=True)
        factors = [(left, rows), (right, columns)]
        return [
            *(_reduced(wrong, x) for x in terms),
            *(None if x is None else np.broadcast_to(mask, x.shape) for x, mask in factors),
        ]
    return [None] * len(arrays)


def _reduced(wrong: Mask, array: Array | None) -> Mask | None:
    """Return a mask of the output for an input that was broadcast to it."""
    if array is None or array.ndim > wrong.ndim:
        return None
    mask = np.any(wrong, axis=tuple(range(wrong.ndim - array.ndim)))
    ones = tuple(axis for axis, size in enumerate(array.shape) if size == 1)
    mask = np.any(mask, axis=ones, keepdims=True)
    return mask if mask.shape == array.shape else None


def _elements(arrays: Sequence[Array | None], made: Array, wrong: Mask) -> tuple[BadElement, ...]:
    shown = [_broadcast(x, made.shape) for x in arrays]
    elements = []
    for flat in np.flatnonzero(wrong)[:_ELEMENTS]:
        index = tuple(int(i) for i in np.unravel_index(flat, made.shape))
        values = ["" if x is None else f"{x[index]:.6g}" for x in shown]
        elements.append(BadElement(index, (*values, f"{made[index]:.6g}")))
    return tuple(elements)


def _broadcast(array: Array | None, shape: tuple[int, ...]) -> Array | None:
    try:
        return None if array is None else np.broadcast_to(array, shape)
    except ValueError:
        return None
