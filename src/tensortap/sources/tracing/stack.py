"""Many values as one: the callback that stacks tensors of different sizes."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from tensortap.errors import TensortapError

_NUMBERS = (bool, int, float, complex)
_EXACT = 1 << 53  # integers up to here are floats without loss


def stack_padded_tensors(
    name: str, values: list[Any], iterations: list[Any], ranks: list[Any], *, fill: float = 0
) -> None:
    """Replace the values by one: stacked along a new first dimension, padded to the largest.

    Padding is zeros, or `fill` (``functools.partial(tap.stack_padded_tensors, fill=math.nan)``).
    Numbers become a tensor too. Texts and other values are left as they are. The iterations
    and ranks of the stacked values become one list each, so that ``iterations[0][i]`` belongs to
    ``values[0][i]``.

    >>> values, iterations, ranks = [np.ones(2), np.ones(3)], [4, 5], [0, 0]
    >>> stack_padded_tensors("forward.x", values, iterations, ranks)
    >>> values, iterations, ranks
    ([array([[1., 1., 0.],
             [1., 1., 1.]])], [[4, 5]], [[0, 0]])
    """
    if not values:
        return
    stacked = _stack(name, values, fill)
    if stacked is not None:
        values[:] = [stacked]
        iterations[:] = [list(iterations)]
        ranks[:] = [list(ranks)]


def _stack(name: str, values: list[Any], fill: float) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and all(isinstance(value, torch.Tensor) for value in values):
        return _stack_torch(name, values, fill)
    if all(isinstance(value, (np.ndarray, np.generic)) for value in values):
        return _stack_numpy(name, [np.asarray(value) for value in values], fill)
    if all(type(value) in _NUMBERS for value in values):
        numbers = _numbers(values)
        return numbers if numbers is None or torch is None else torch.from_numpy(numbers)
    return None


def _numbers(values: list[Any]) -> Any:
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return np.array(values, np.bool_)
    if complex in kinds or float in kinds:
        if all(abs(value) <= _EXACT for value in values if isinstance(value, int)):
            return np.array(values, np.complex128 if complex in kinds else np.float64)
    elif all(-(1 << 63) <= value < 1 << 63 for value in values):
        return np.array(values, np.int64)
    return None


def _shape(name: str, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    counts = sorted({len(shape) for shape in shapes})
    if len(counts) > 1:
        raise TensortapError(
            f"{name} has tensors of {counts[0]} and of {counts[-1]} dimensions, which can't be "
            f"stacked: give them one number of dimensions in a callback before"
        )
    return tuple([max(sizes) for sizes in zip(*shapes, strict=True)])


def _no_fill(name: str, fill: float, dtype: object) -> TensortapError:
    return TensortapError(f"{name} is {dtype}, which has no {fill} to pad with: say another fill")


def _stack_numpy(name: str, values: list[Any], fill: float) -> Any:
    dtypes = {value.dtype for value in values}
    if len(dtypes) > 1:
        raise _differ(name, sorted(map(str, dtypes)))
    (dtype,) = dtypes
    shape = _shape(name, [value.shape for value in values])
    if all(value.shape == shape for value in values):
        return np.stack(values)
    if dtype.kind in "iub" and not float(fill).is_integer():
        raise _no_fill(name, fill, dtype)
    found = np.full((len(values), *shape), fill, dtype)
    for row, value in zip(found, values, strict=True):
        row[tuple([slice(size) for size in value.shape])] = value
    return found


def _stack_torch(name: str, values: list[Any], fill: float) -> Any:
    import torch

    from tensortap.frameworks.torch.tensors import quiet

    with quiet(), torch.inference_mode(False):
        values = [value.detach() for value in values]
        dtype = _common(name, {value.dtype for value in values})
        shape = _shape(name, [tuple(value.shape) for value in values])
        device = values[0].device
        found = torch.empty((len(values), *shape), dtype=dtype, device=device)
        padded = math.prod(shape) * len(values) != sum(value.numel() for value in values)
        if padded:
            found.copy_(_pad(name, fill, dtype).to(device).expand_as(found))
        for row, value in zip(found, values, strict=True):
            row[tuple([slice(size) for size in value.shape])].copy_(value)
        return found


def _pad(name: str, fill: float, dtype: Any) -> Any:
    import torch

    whole = not (dtype.is_floating_point or dtype.is_complex)
    if whole and not float(fill).is_integer():
        raise _no_fill(name, fill, dtype)
    # by way of a common dtype: not every one can be filled
    pad = torch.tensor(fill, dtype=dtype if dtype.itemsize > 1 else None).to(dtype)
    back = complex(pad.item()).real if dtype.is_complex else float(pad.to(torch.float64).item())
    if (fill == 0) != (back == 0) or math.isnan(fill) != math.isnan(back):
        raise _no_fill(name, fill, dtype)
    return pad


def _common(name: str, dtypes: set[Any]) -> Any:
    """The dtype that holds all of them exactly."""
    import torch

    if len(dtypes) == 1:
        return next(iter(dtypes))
    kinds = {(dtype.is_complex, dtype.is_floating_point) for dtype in dtypes - {torch.bool}}
    if len(kinds) == 1 and torch.uint64 not in dtypes:
        found, *others = dtypes
        try:
            for other in others:
                found = torch.promote_types(found, other)
            return found
        except RuntimeError:
            pass  # float8
    raise _differ(name, sorted(str(dtype) for dtype in dtypes))


def _differ(name: str, dtypes: list[str]) -> TensortapError:
    return TensortapError(
        f"{name} has tensors of {' and '.join(dtypes)}, which no dtype holds exactly: make them "
        f"one in a callback before"
    )
