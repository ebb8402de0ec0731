"""Extra statistics of each tensor: from a function of the user, and losses in block formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tensortap import values as arrays
from tensortap.capture.pipeline import pipeline
from tensortap.stats.blocks import quantize_array
from tensortap.values.view import array_of


def stashed(given: Any) -> tuple[list[tuple[Any, Any]], int]:
    """Return what a stash gave by name, and its bytes; dicts in it are flattened with dots.

    >>> stashed({"l1": 2, "scalar_stats": {"std": 0.5}, "bins": [3, 4]})[0]
    [('l1', 2.0), ('scalar_stats.std', 0.5), ('bins', Items(kind='list', items=(3, 4)))]
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"stash must return a dict, got {given!r:.80}")
    found: list[tuple[Any, Any]] = []
    total = 0
    for key, value in given.items():
        if isinstance(value, Mapping):
            inner, nbytes = stashed(value)
            found += [(f"{key}.{name}", each) for name, each in inner]
            total += nbytes
            continue
        try:
            found.append((str(key), float(value)))
        except (TypeError, ValueError, RuntimeError):  # not a single number
            snapshot, nbytes = arrays.snapshot(value, pipeline.pool)
            found.append((str(key), snapshot))
            total += nbytes
    return found, total


def stash_of(
    given: Callable[[Any], Mapping[str, Any]] | None, formats: Sequence[str]
) -> Callable[[Any], Mapping[str, Any]] | None:
    """Return a stash that adds the losses in block formats to what the user's stash gives.

    >>> stash_of(lambda x: {"l1": 3.0}, ["mxfp4"])(np.ones((1, 32), np.float32))["mxfp4"]["sqnr"]
    inf
    """
    if not formats:
        return given

    def stash(value: Any) -> dict[str, Any]:
        array = array_of(value)
        found = {} if given is None else dict(given(value))
        if array is not None and array.dtype.kind not in "biuc":
            array = np.atleast_1d(array)
            found |= {each: quantize_array(array, each).totals() for each in formats}
        return found

    return stash
