"""Callbacks of compiled JAX code that tell on which device it runs, and whether it recomputes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from tensortap.frameworks.protocol import CompiledRun

_REMAT = "rematted_computation"  # the scope in which JAX compiles what a checkpoint recomputes

# 0, and 1 where the value is recomputed: known only when the code around it is compiled
recomputed_p = Primitive("tensortap_recomputed")
recomputed_p.def_impl(lambda zero: zero)
recomputed_p.def_abstract_eval(lambda zero: zero)
batching.defvectorized(recomputed_p)


def _lower(context: Any, zero: Any) -> Any:
    if _REMAT not in str(getattr(context, "name_stack", "")):
        return [zero]
    return mlir.lower_fun(lambda zero: zero + jnp.uint8(1), multiple_results=False)(context, zero)


try:
    # JAX would compile the first place for all others
    mlir.register_lowering(recomputed_p, _lower, cacheable=False)
except TypeError:  # an older release, which caches nothing
    mlir.register_lowering(recomputed_p, _lower)


def call_back(capture: Callable[..., object], value: Any) -> None:
    """Make the function that is being traced call ``capture(value, run=…)`` whenever it runs."""
    axes = manual_axes()
    places = [jax.lax.axis_index(axis) for axis in axes]
    again = recomputed_p.bind(jnp.uint8(0))
    jax.debug.callback(functools.partial(_captured, capture, axes), value, again, *places)


def _captured(
    capture: Callable[..., object], axes: dict[str, int], value: Any, again: Any, *places: Any
) -> None:
    run = None
    if axes or again:
        device = 0
        for place, size in zip(places, axes.values(), strict=True):
            device = device * size + int(place)
        named = [f"{axis}={int(place)}" for axis, place in zip(axes, places, strict=True)]
        tags = {"device": " ".join(named)} if axes else {}
        run = CompiledRun(
            device, math.prod(axes.values()), {**tags, "recompute": "1"} if again else tags
        )
    capture(value, run=run)


def manual_axes() -> dict[str, int]:
    """Return the axes of the mesh over which `shard_map` maps this code, with their sizes."""
    get_mesh = getattr(jax.sharding, "get_abstract_mesh", None)  # before JAX 0.5 there is none
    mesh = get_mesh() if get_mesh is not None else None
    manual = getattr(mesh, "manual_axes", ())
    return {axis: size for axis, size in dict(getattr(mesh, "shape", {})).items() if axis in manual}
