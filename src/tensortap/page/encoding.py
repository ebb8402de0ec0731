"""Arrays as JSON."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray


def typed(values: NDArray[Any]) -> Any:
    """Return an array for JSON: base 64 in plotly's form, or a list of at most 16 elements."""
    values = np.asarray(values)
    if values.dtype == np.int64:
        fits = not values.size or (values.min() >= -(2**31) and values.max() < 2**31)
        values = values.astype(np.int32 if fits else np.float64)
    if values.size <= 16 and values.ndim == 1:
        return [None if value != value else value for value in values.tolist()]
    data = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
    encoded = {"dtype": f"{values.dtype.kind}{values.dtype.itemsize}", "bdata": data}
    if values.ndim > 1:
        encoded["shape"] = ", ".join(map(str, values.shape))
    return encoded
