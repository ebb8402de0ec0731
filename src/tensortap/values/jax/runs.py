"""Compiled JAX code that calls back: with values, where it runs and whether it recomputes.

Gradients are caught by an identity operation. A `custom_vjp` would do the same, but not in forward
mode, which a program may use as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

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


def call_back(
    capture: Callable[..., object], value: Any, axes: dict[str, int], shard: Any = None
) -> None:
    """Make the function that is being traced call ``capture(value, run=…)`` whenever it runs.

    `axes` are the `manual_axes`. `shard` is a `Shard`, or the PartitionSpec of the value in
    `shard_map`.
    """
    mesh = DeviceMesh(axes, _varying(value, axes), shard)
    mesh.shard((0,) * len(mesh.axes), value.shape)  # raises for a wrong spec now
    places = [jax.lax.axis_index(axis) for axis in mesh.axes]
    again = recomputed_p.bind(jnp.uint8(0))
    captured = functools.partial(_captured, capture, mesh)
    jax.debug.callback(captured, value, again, *places)


def _captured(
    capture: Callable[..., object], mesh: DeviceMesh, value: Any, again: Any, *places: Any
) -> None:
    at = tuple(map(int, places))
    shard = mesh.shard(at, np.shape(value))
    tags = {"recompute": "1"} if again else {}
    device = 0
    if at:
        for place, size in zip(at, mesh.axes.values(), strict=True):
            device = device * size + place
        names = (str(axis).replace(_PMAP, "pmap") for axis in mesh.axes)
        named = " ".join(f"{axis}={place}" for axis, place in zip(names, at, strict=True))
        tags |= {"device": named, "devices": str(mesh.size)}
    run = CompiledRun(device, mesh.size, tags, shard)
    capture(value, run=run if tags or shard is not None else None)


class DeviceMesh(NamedTuple):
    """The axes over which `shard_map` maps a value, those over which it varies, and its layout."""

    axes: dict[str, int]
    varying: frozenset[str]
    layout: Any  # a Shard, a PartitionSpec or None

    @property
    def size(self) -> int:
        return math.prod(self.axes.values())

    def shard(self, at: tuple[int, ...], shape: tuple[int, ...]) -> Shard | None:
        """Return which part of the whole the value of a device is.

        Without a layout, the whole is the values of all devices, stacked along one new leading
        dimension for each axis over which they vary.

        >>> DeviceMesh({"x": 4, "y": 2}, frozenset("x"), None).shard((3, 1), (5,))
        Shard(global_shape=(4, 5), offsets=(3, 0), placements=('S(0)', 'R'))
        >>> DeviceMesh({"x": 4, "y": 2}, frozenset("x"), ("y", "x")).shard((3, 1), (5, 6))
        Shard(global_shape=(10, 24), offsets=(5, 18), placements=('S(1)', 'S(0)'))
        """
        if not self.axes or isinstance(self.layout, Shard):
            return self.layout if isinstance(self.layout, Shard) else None
        place = dict(zip(self.axes, at, strict=True))
        if self.layout is None:
            split = [(axis,) for axis in self.axes if axis in self.varying]
            shape = (1,) * len(split) + shape
        else:
            named = (() if axes is None else axes for axes in self.layout)
            split = [(axes,) if isinstance(axes, str) else tuple(axes) for axes in named]
        dims = {axis: dim for dim, axes in enumerate(split) for axis in axes}
        if len(split) > len(shape) or not dims.keys() <= self.axes.keys():
            raise ValueError(
                f"shard must be a PartitionSpec with at most {len(shape)} entries of the axes "
                f"{', '.join(self.axes)}, got {self.layout}"
            )
        whole, offsets = list(shape), [0] * len(shape)
        for dim, axes in enumerate(split):
            for axis in axes:  # the first is the slowest
                offsets[dim] = offsets[dim] * self.axes[axis] + place[axis]
                whole[dim] *= self.axes[axis]
            offsets[dim] *= shape[dim]
        placements = (f"S({dims[axis]})" if axis in dims else "R" for axis in self.axes)
        return Shard(tuple(whole), tuple(offsets), tuple(placements))


def _varying(value: Any, axes: dict[str, int]) -> frozenset[str]:
    """Return the axes over which a value differs between devices, as far as JAX keeps account."""
    counted = any(axis in _varying_axes(jax.lax.axis_index(axis)) for axis in axes)
    return _varying_axes(value) if counted else frozenset(axes)  # not with check_vma=False


def _varying_axes(value: Any) -> frozenset[str]:
    kind = jax.typeof(value)
    found = getattr(getattr(kind, "manual_axis_type", None), "varying", None)
    return frozenset(getattr(kind, "vma", ()) if found is None else found)  # before JAX 0.10


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
