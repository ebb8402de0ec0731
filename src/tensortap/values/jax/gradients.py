"""`tap.catch_grad` for JAX: an identity operation whose backward pass catches the gradient.

A `custom_vjp` would do the same, but not in forward mode, which a program may use as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

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
