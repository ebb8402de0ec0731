"""Singular values of matrices: all of small ones, the largest of large ones."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

EXACT = 1024
"""Rows or columns up to which all singular values are computed."""

SKETCH = 512
"""Singular values that are estimated of larger matrices."""


class Spectrum(NamedTuple):
    """Figures of singular values.

    `stable_rank` is the sum of their squares divided by the largest square, `effective_rank` the
    exponential of their entropy. `captured` is the share of the sum of squares that they have; it
    is 1 if all of them were computed.
    """

    largest: float
    stable_rank: float
    effective_rank: float
    captured: float = 1.0


def spectrum(matrix: NDArray[Any]) -> Spectrum | None:
    """Return figures of the singular values; None if there is none above 0, or a NaN.

    Of a matrix with more than 1024 rows and columns, 512 singular values come from a random
    projection. None is larger than the true one. The largest is at least ``largest`` and at most
    ``largest * sqrt(1 + (1 - captured) * stable_rank)``; `stable_rank` is too large by at most the
    square of that factor. `effective_rank` is that of the share `captured`.

    >>> spectrum(np.diag([2.0, 2.0, 0.0]))
    Spectrum(largest=2.0, stable_rank=2.0, effective_rank=2.0, captured=1.0)
    """
    values = np.asarray(matrix, np.float64)
    if not values.size or not np.isfinite(values).all():
        return None
    if values.shape[0] < values.shape[1]:
        values = values.T
    total = float(np.vdot(values, values))
    if total == 0:
        return None
    if values.shape[1] <= EXACT:
        sizes = np.linalg.svd(np.linalg.qr(values, mode="r"), compute_uv=False)
        captured = 1.0
    else:
        sizes = _largest_values(values)
        captured = min(1.0, float(sizes @ sizes) / total)
    share = sizes[sizes > 0] / sizes.sum()
    entropy = -float((share * np.log(share)).sum())
    largest = float(sizes[0])
    return Spectrum(largest, total / largest**2, math.exp(entropy), captured)


def _largest_values(values: NDArray[np.float64]) -> NDArray[Any]:
    """Return the singular values of a projection onto what two passes over a sketch find."""
    random = np.random.default_rng(0).standard_normal((values.shape[1], SKETCH))
    basis, _ = np.linalg.qr(values @ random)
    for _ in range(2):
        basis, _ = np.linalg.qr(values.T @ basis)
        basis, _ = np.linalg.qr(values @ basis)
    sizes: NDArray[Any] = np.linalg.svd(basis.T @ values, compute_uv=False)
    return sizes
