"""`stack_padded_tensors`: a callback that makes one tensor of many."""

from __future__ import annotations

from typing import Any

from tensortap.frameworks.registry import loaded_frameworks


def stack_padded_tensors(
    name: str, values: list[Any], iterations: list[Any], ranks: list[Any], *, fill: float = 0
) -> None:
    """Replace the values by one: stacked along a new first dimension, padded to the largest.

    Padding is zeros, or `fill` (``functools.partial(tap.stack_padded_tensors, fill=math.nan)``).
    Numbers become a tensor, too. Text and other values stay as they are. The iterations and ranks
    of the stacked values become one list each, so that ``iterations[0][i]`` belongs to
    ``values[0][i]``.

    >>> import numpy as np
    >>> values, iterations, ranks = [np.ones(2), np.ones(3)], [4, 5], [0, 0]
    >>> stack_padded_tensors("forward.x", values, iterations, ranks)
    >>> values, iterations, ranks
    ([array([[1., 1., 0.],
             [1., 1., 1.]])], [[4, 5]], [[0, 0]])
    """
    if not values:
        return
    stacks = (each.stack(name, values, fill) for each in loaded_frameworks())
    stacked = next((each for each in stacks if each is not None), None)
    if stacked is not None:
        values[:] = [stacked]
        iterations[:] = [list(iterations)]
        ranks[:] = [list(ranks)]
