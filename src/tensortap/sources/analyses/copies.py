"""Copies of arrays from one observed step to the next, bounded in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 1 << 30
"""Bytes of copies that one analysis holds."""


class Copies:
    """Memory for `times` copies of each array, by name, as long as there is room."""

    def __init__(self, times: int = 1) -> None:
        self._times = times
        self._memory: dict[str, NDArray[Any]] = {}
        self._nbytes = 0

    def of(self, name: str, like: NDArray[Any]) -> tuple[NDArray[Any] | None, bool]:
        """Return memory for copies of an array, and whether it is that of the last time.

        None if there is no room.
        """
        known = self._memory.get(name)
        if known is not None and known.shape[1:] == like.shape and known.dtype == like.dtype:
            return known, True
        if known is not None:
            self._nbytes -= self._memory.pop(name).nbytes
        if self._nbytes + self._times * like.nbytes > LARGEST:
            return None, False
        made = self._memory[name] = np.empty((self._times, *like.shape), like.dtype)
        self._nbytes += made.nbytes
        return made, False

    def clear(self) -> None:
        """Let go of all copies."""
        self._memory.clear()
        self._nbytes = 0


def beyond() -> str:
    """Say that there is no room for all copies."""
    return (
        f"copies are bounded to {LARGEST >> 20} MiB, and some parameters are beyond: "
        "include= selects others"
    )
