"""Samples of what modules in a JAX program return, for analyses on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from tensortap.stats.activations import evenly_spaced

ROWS = 1024
"""Rows of a sample, at most; they are evenly spaced."""

_DTYPES = ("float32", "bfloat16", "float16")


class ActivationSample(NamedTuple):
    """Rows of an output, one column per channel, followed by a 1: all zeros were not computed."""

    rows: int
    channels: int

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.rows * self.channels + 1

    def matrix(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """Return the rows."""
        values = np.ascontiguousarray(words).view(np.float32)[:-1]
        return values.reshape(self.rows, self.channels)


def sample_output(array: Any) -> tuple[ActivationSample, Any] | None:
    """Return rows of an output, as a vector of float32; None if it is no matrix of floats."""
    if array.ndim < 2 or not array.size or array.dtype.name not in _DTYPES:
        return None
    matrix = jax.lax.stop_gradient(array).reshape(-1, array.shape[-1])
    picked = evenly_spaced(len(matrix), ROWS)
    rows = matrix if len(picked) == len(matrix) else matrix[picked]
    values = jnp.concatenate([rows.astype(jnp.float32).ravel(), jnp.ones(1, jnp.float32)])
    return ActivationSample(*rows.shape), values
