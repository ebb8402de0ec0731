"""Extra statistics of each tensor, from a function of the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensortap import values as arrays
from tensortap.capture.pipeline import pipeline


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
