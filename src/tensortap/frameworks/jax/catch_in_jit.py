"""`catch` of a value that is only being traced: the compiled function delivers it when it runs.

The function calls back with the whole value, in whatever it is transformed by: for each
iteration of a `scan`, for each element under `vmap`, and again where `jax.checkpoint` computes
it again. Whether anybody listens is asked then, not when it is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from tensortap.pipeline.pipeline import pipeline


def tracers() -> Iterator[type]:
    """The classes of traced values that there are now."""
    classes: list[type] = [Tracer]
    while classes:
        cls = classes.pop()
        yield cls
        classes += cls.__subclasses__()


def insert(
    value: Any,
    name: str,
    every: int,
    first: int | None,
    when: Any,
    changed: bool,
    server: str | None,
) -> None:
    """Have the function that is being traced catch this value whenever it runs."""
    if not isinstance(value.dtype, np.dtype):
        from tensortap.errors import CaptureError

        raise CaptureError(
            f"an array of {value.dtype} holds random keys, not numbers: catch "
            "jax.random.key_data(key)"
        )
    deliver = functools.partial(
        _deliver, name=name, every=every, first=first, when=when, changed=changed, server=server
    )
    jax.debug.callback(deliver, jax.lax.stop_gradient(value))
    # what a step computed is to be caught in that step, although nobody waits for it otherwise
    if jax.effects_barrier not in pipeline.settlers:
        pipeline.settlers.append(jax.effects_barrier)


def _deliver(value: Any, *, name: str, when: Any, **options: Any) -> None:
    from tensortap.sources.catch import catch

    if callable(when):
        # NumPy: JAX must not compute in a callback, the thread that would do it waits for us
        when = functools.partial(_of_numpy, when)
    catch(value, name, when=when, **options)


def _of_numpy(condition: Any, value: Any) -> Any:
    return condition(np.asarray(value))
