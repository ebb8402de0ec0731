"""Compiled JAX code that calls back: with values, where it runs and whether it recomputes.

Gradients are caught by an identity operation. A `custom_vjp` would do the same, but not in forward
mode, which a program may use as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tensortap.core.record import Shard
from tensortap.values.protocol import CompiledRun

_PMAP = "_internal_pmap_axis_name"  # the name of an axis of pmap that has none
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


# else JAX would compile the first place for all others
mlir.register_lowering(recomputed_p, _lower, cacheable=False)


def call_back(capture: Callable[..., object], value: Any, axes: dict[str, int]) -> None:
    """Make the function that is being traced call ``capture(value, run=…)`` whenever it runs."""
    places = [jax.lax.axis_index(axis) for axis in axes]
    again = recomputed_p.bind(jnp.uint8(0))
    captured = functools.partial(_captured, capture, axes)
    jax.debug.callback(captured, value, again, *places)


def _captured(
    capture: Callable[..., object], axes: dict[str, int], value: Any, again: Any, *places: Any
) -> None:
    at = tuple(map(int, places))
    shard = _shard(axes, at, np.shape(value))
    tags = {"recompute": "1"} if again else {}
    device, devices = 0, math.prod(axes.values())
    if at:
        for place, size in zip(at, axes.values(), strict=True):
            device = device * size + place
        names = (str(axis).replace(_PMAP, "pmap") for axis in axes)
        named = " ".join(f"{axis}={place}" for axis, place in zip(names, at, strict=True))
        tags |= {"device": named, "devices": str(devices)}
    capture(value, run=CompiledRun(device, devices, tags, shard) if tags else None)


def _shard(axes: dict[str, int], at: tuple[int, ...], shape: tuple[int, ...]) -> Shard | None:
    """Return the part of the whole array that a device holds.

    The whole is the values of all devices, stacked along one new leading dimension for each axis.

    >>> _shard({"x": 4, "y": 2}, (3, 1), (5,))
    Shard(global_shape=(4, 2, 5), offsets=(3, 1, 0), placements=('S(0)', 'S(1)'))
    """
    if not axes:
        return None
    placements = tuple(f"S({dim})" for dim in range(len(axes)))
    return Shard((*axes.values(), *shape), (*at, *(0 for _ in shape)), placements)


def manual_axes() -> dict[str, int]:
    """Return the axes of the mesh over which `shard_map` maps this code, with their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: size for axis, size in mesh.shape.items() if axis in mesh.manual_axes}


# -- gradients ---------------------------------------------------------------------------

gradient_p = Primitive("tensortap_gradient")
_tangent_p = Primitive("tensortap_gradient_tangent")


def catch_gradient(value: Any, capture: Callable[..., object]) -> Any:
    """Return the value; differentiation calls ``capture(gradient)``, also while it is traced."""
    return gradient_p.bind(value, capture=capture)


def _jvp(primals: Any, tangents: Any, *, capture: Callable[..., object]) -> Any:
    (x,), (t,) = primals, tangents
    if type(t) is not ad.Zero:
        t = _tangent_p.bind(t, capture=capture)
    return gradient_p.bind(x, capture=capture), t


def _transpose(ct: Any, x: Any, *, capture: Callable[..., object]) -> Any:
    if type(ct) is not ad.Zero:
        capture(ct)
    return (ct,)


for _each in (gradient_p, _tangent_p):
    _each.def_impl(lambda x, *, capture: x)
    _each.def_abstract_eval(lambda x, *, capture: x)
    batching.defvectorized(_each)
    mlir.register_lowering(_each, lambda context, x, *, capture: [x])
ad.primitive_jvps[gradient_p] = _jvp
ad.deflinear2(_tangent_p, _transpose)
