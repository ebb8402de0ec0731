"""Torch tensors of different sizes, stacked into one."""

from __future__ import annotations

import math
from typing import Any

import torch

from tensortap.rooms.trace.numpy_stack import (
    array_of_numbers,
    cannot_fill,
    corner,
    no_common_dtype,
    padded_shape,
)
from tensortap.values.torch.tensors import quiet


def stack(name: str, values: list[Any], fill: float) -> torch.Tensor | None:
    """Return tensors or numbers stacked along a new first dimension, padded with `fill`."""
    if not all(isinstance(value, torch.Tensor) for value in values):
        numbers = array_of_numbers(values)
        return None if numbers is None else torch.from_numpy(numbers)
    with quiet(), torch.inference_mode(False):
        values = [value.detach() for value in values]
        dtype = _common_dtype(name, {value.dtype for value in values})
        shape = padded_shape([tuple(value.shape) for value in values])
        device = values[0].device
        stacked = torch.empty((len(values), *shape), dtype=dtype, device=device)
        if math.prod(shape) * len(values) != sum(value.numel() for value in values):
            stacked.copy_(_padding(name, fill, dtype).to(device).expand_as(stacked))
        for row, value in zip(stacked, values, strict=True):
            corner(row, tuple(value.shape)).copy_(value)
        return stacked


def _padding(name: str, fill: float, dtype: torch.dtype) -> torch.Tensor:
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if whole and not float(fill).is_integer():
        raise cannot_fill(name, fill, dtype)
    # by way of a common dtype: torch cannot fill every one
    padding = torch.tensor(fill, dtype=dtype if dtype.itemsize > 1 else None).to(dtype)
    number = padding.item() if dtype.is_complex else padding.to(torch.float64).item()
    real = complex(number).real
    if (fill == 0) != (real == 0) or math.isnan(fill) != math.isnan(real):
        raise cannot_fill(name, fill, dtype)
    return padding


def _common_dtype(name: str, dtypes: set[torch.dtype]) -> torch.dtype:
    """Return the dtype that holds all of these exactly."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    kinds = {(dtype.is_complex, dtype.is_floating_point) for dtype in dtypes - {torch.bool}}
    if len(kinds) == 1 and torch.uint64 not in dtypes:
        common, *others = dtypes
        try:
            for other in others:
                common = torch.promote_types(common, other)
            return common
        except RuntimeError:
            pass  # float8 is not promoted
    raise no_common_dtype(name, dtypes)
