"""The mark on a value inside a JAX function: an identity that survives every transformation.

`mark` returns its argument. What it leaves behind in the program says where an activation is,
and, once the program has been differentiated, where the gradient that belongs to it is.
`tensortap.frameworks.jax.harvest` turns marks into outputs; one that it cannot reach (the body of
a `while_loop`, a function that was compiled on its own) calls back with the small vector of
statistics when it runs, so that nothing is missed.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tensortap.frameworks.jax.device_stats import can_reduce, pack
from tensortap.record import Kind


@dataclass(frozen=True, slots=True)
class Mark:
    """What is marked: an activation, or the gradient of one.

    `part` tells the leaves of an output that is a tuple or dict. `uid` is the same for a value
    and its gradient. `activation` and `gradient` say which of both is wanted.
    """

    kind: Kind
    name: str
    part: str
    type: str
    uid: int
    activation: bool
    gradient: bool

    @property
    def wanted(self) -> bool:
        """Whether this is one of those that are to be seen."""
        return self.gradient if self.kind is Kind.GRADIENT else self.activation


Receiver = Callable[[Mark, Any], None]
"""Takes a mark and the value under it, when a function runs without being compiled."""

_uids = itertools.count()
_here = threading.local()

value_p = Primitive("tensortap_value")
tangent_p = Primitive("tensortap_tangent")


def mark(
    x: Any,
    name: str,
    *,
    part: str = "",
    module: str = "",
    activation: bool = True,
    gradient: bool = True,
) -> Any:
    """`x` itself, marked; its gradient will be as well."""
    what = Mark(Kind.ACTIVATION, name, part, module, next(_uids), activation, gradient)
    return value_p.bind(x, mark=what)


class receiving:  # noqa: N801  # read as a verb: `with receiving(...)`
    """Marks on concrete values go to `receiver`, in this thread."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def __enter__(self) -> None:
        self._before = getattr(_here, "receiver", None)
        _here.receiver = self._receiver

    def __exit__(self, *error: object) -> None:
        _here.receiver = self._before


def _run(x: Any, *, mark: Mark) -> Any:
    receiver: Receiver | None = getattr(_here, "receiver", None)
    if receiver is not None and mark.wanted:
        receiver(mark, x)
    return x


value_p.def_impl(_run)
value_p.def_abstract_eval(lambda x, *, mark: x)
tangent_p.def_impl(lambda x, *, mark: x)
tangent_p.def_abstract_eval(lambda x, *, mark: x)


def _jvp(primals: Any, tangents: Any, *, mark: Mark) -> Any:
    (x,), (t,) = primals, tangents
    if mark.gradient and type(t) is not ad.Zero:
        t = tangent_p.bind(t, mark=mark)
    return value_p.bind(x, mark=mark), t


def _transpose(ct: Any, x: Any, *, mark: Mark) -> Any:
    if type(ct) is ad.Zero:
        return (ct,)
    return (value_p.bind(ct, mark=replace(mark, kind=Kind.GRADIENT)),)


ad.primitive_jvps[value_p] = _jvp
ad.deflinear2(tangent_p, _transpose)
batching.defvectorized(value_p)
batching.defvectorized(tangent_p)

# -- marks that nobody harvested -------------------------------------------------------------

_late: Callable[[Mark, str, tuple[int, ...], Any], None] | None = None
_lowered = False


def deliver_to(receiver: Callable[[Mark, str, tuple[int, ...], Any], None] | None) -> None:
    """Who gets the statistics that compiled code calls back with: mark, dtype, shape, vector."""
    global _late
    _late = receiver


def may_call_back() -> bool:
    """Whether any code was compiled that calls back."""
    return _lowered


def _deliver(mark: Mark, dtype: str, shape: tuple[int, ...], vector: Any) -> None:
    receiver = _late
    if receiver is not None:
        receiver(mark, dtype, shape, vector)


def _calling_back(x: Any, *, mark: Mark) -> Any:
    global _lowered
    if not mark.wanted or not can_reduce(x.dtype):
        return x
    _lowered = True
    jax.debug.callback(functools.partial(_deliver, mark, x.dtype.name, x.shape), pack(x))
    return x


mlir.register_lowering(value_p, mlir.lower_fun(_calling_back, multiple_results=False))
mlir.register_lowering(tangent_p, lambda ctx, x, *, mark: [x])
