"""Capturing a value that JAX is tracing: the compiled function delivers it each time it runs.

The function calls back with the whole value, under all transformations: for each iteration of a
`scan`, for each element under `vmap`, and again where `jax.checkpoint` recomputes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from tensortap.frameworks.jax.adapter import reject_random_keys

wait_for_callbacks = jax.effects_barrier
"""Waits until running functions have delivered their values."""


def tracers() -> Iterator[type]:
    """Yield the classes of traced values that exist now."""
    classes: list[type] = [Tracer]
    while classes:
        cls = classes.pop()
        yield cls
        classes += cls.__subclasses__()


def insert_callback(value: Any, capture: Callable[..., object], when: Any) -> None:
    """Make the traced function call ``capture(value, when=when)`` whenever it runs."""
    reject_random_keys(value.dtype)
    # NumPy, because JAX must not compute in a callback: the thread for it waits for us
    condition = (lambda value: when(np.asarray(value))) if callable(when) else when
    jax.debug.callback(lambda value: capture(value, when=condition), jax.lax.stop_gradient(value))
