"""The statistics of a tensor where it lies: at once in memory, later on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tensortap.errors import CaptureError
from tensortap.frameworks.snapshot import adapter_of
from tensortap.record import Summary


class Later(NamedTuple):
    """A summary that a device is working on."""

    ready: Callable[[], bool]
    resolve: Callable[[], Summary | None]


def summary_of(value: Any) -> tuple[Summary | None, Later | None]:
    """The summary, or the promise of one.

    >>> import numpy as np
    >>> summary_of(np.ones(3))[0].mean
    1.0
    """
    if getattr(value, "is_cuda", False):
        from tensortap.frameworks.torch.device_stats import reduce_later

        return None, reduce_later(value)
    found = adapter_of(type(value)).summarize
    if found is None:
        raise CaptureError(f"no statistics of a {type(value).__name__}: give an array or a tensor")
    return found(value), None
