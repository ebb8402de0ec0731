"""NumPy arrays of different sizes, stacked into one."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensortap.frameworks.stacking import (
    array_of_numbers,
    cannot_fill,
    no_common_dtype,
    padded_shape,
)


def stack(name: str, values: list[Any], fill: float) -> np.ndarray[Any, Any] | None:
    """Return arrays or numbers stacked along a new first dimension, padded with `fill`."""
    if not all(isinstance(value, (np.ndarray, np.generic)) for value in values):
        return array_of_numbers(values)
    arrays = [np.asarray(value) for value in values]
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) > 1:
        raise no_common_dtype(name, dtypes)
    (dtype,) = dtypes
    shape = padded_shape(name, [array.shape for array in arrays])
    if all(array.shape == shape for array in arrays):
        return np.stack(arrays)
    if dtype.kind in "iub" and not float(fill).is_integer():
        raise cannot_fill(name, fill, dtype)
    stacked = np.full((len(arrays), *shape), fill, dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[tuple([slice(size) for size in array.shape])] = array
    return stacked
