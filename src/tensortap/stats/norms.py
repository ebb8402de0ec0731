"""Norms and products of arrays, summed in double precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def norm(array: Any) -> float:
    """Return the Euclidean norm of an array.

    >>> norm(np.array([3.0, 4.0], np.float32))
    5.0
    """
    flat = np.asarray(array).ravel().astype(np.float64)
    return math.sqrt(float(flat @ flat))
