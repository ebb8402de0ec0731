"""Marks on values inside JAX functions: an identity operation that survives transformations.

`mark` returns its argument. In the traced program it labels an activation, and once the program
is differentiated also the gradient of that activation. `tensortap.frameworks.jax.harvest` turns
marks into outputs. A mark that it cannot reach (in the body of a `while_loop`, or in a function
that JAX compiles on its own) compiles to a callback with the statistics.
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
class ValueMark:
    """The label of an activation or of its gradient.

    `part` is the path of a leaf in a nested output. A value and its gradient share `uid`.
    `activation` and `gradient` say which of the two are wanted.
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
        """Whether the labeled value itself is to be observed."""
        return self.gradient if self.kind is Kind.GRADIENT else self.activation


_uids = itertools.count()
_thread = threading.local()

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
    """Return `x`, marked; differentiation marks its gradient as well."""
    label = ValueMark(Kind.ACTIVATION, name, part, module, next(_uids), activation, gradient)
    return value_p.bind(x, mark=label)


class EagerMarks:
    """A context in which marks on concrete values, in this thread, go to `receive`.

    `compiled` becomes True if JAX compiles a marked program meanwhile.
    """

    def __init__(self, receive: Callable[[ValueMark, Any], None]) -> None:
        self.receive = receive
        self.compiled = False

    def __enter__(self) -> EagerMarks:
        self._outer: EagerMarks | None = getattr(_thread, "eager", None)
        _thread.eager = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.eager = self._outer


def _receive_concrete(x: Any, *, mark: ValueMark) -> Any:
    eager: EagerMarks | None = getattr(_thread, "eager", None)
    if eager is not None and mark.wanted:
        eager.receive(mark, x)
    return x


value_p.def_impl(_receive_concrete)
value_p.def_abstract_eval(lambda x, *, mark: x)
tangent_p.def_impl(lambda x, *, mark: x)
tangent_p.def_abstract_eval(lambda x, *, mark: x)


def _jvp(primals: Any, tangents: Any, *, mark: ValueMark) -> Any:
    (x,), (t,) = primals, tangents
    if mark.gradient and type(t) is not ad.Zero:
        t = tangent_p.bind(t, mark=mark)
    return value_p.bind(x, mark=mark), t


def _transpose(ct: Any, x: Any, *, mark: ValueMark) -> Any:
    if type(ct) is ad.Zero:
        return (ct,)
    return (value_p.bind(ct, mark=replace(mark, kind=Kind.GRADIENT)),)


ad.primitive_jvps[value_p] = _jvp
ad.deflinear2(tangent_p, _transpose)
batching.defvectorized(value_p)
batching.defvectorized(tangent_p)

# -- marks in compiled code that nobody has harvested ----------------------------------------

CallbackReceiver = Callable[[ValueMark, str, tuple[int, ...], Any], None]
"""Takes what compiled code calls back with: mark, dtype, shape, packed statistics."""

_receiver: CallbackReceiver | None = None
_any_callback = False


def set_callback_receiver(receiver: CallbackReceiver | None) -> None:
    """Set who gets the statistics that compiled code calls back with."""
    global _receiver
    _receiver = receiver


def may_call_back() -> bool:
    """Return whether any code has been compiled that calls back."""
    return _any_callback


def _call_back(mark: ValueMark, dtype: str, shape: tuple[int, ...], vector: Any) -> None:
    receiver = _receiver
    if receiver is not None:
        receiver(mark, dtype, shape, vector)


def _with_callback(x: Any, *, mark: ValueMark) -> Any:
    global _any_callback
    if not mark.wanted or not can_reduce(x.dtype):
        return x
    _any_callback = True
    eager: EagerMarks | None = getattr(_thread, "eager", None)
    if eager is not None:
        eager.compiled = True
    jax.debug.callback(functools.partial(_call_back, mark, x.dtype.name, x.shape), pack(x))
    return x


mlir.register_lowering(value_p, mlir.lower_fun(_with_callback, multiple_results=False))
mlir.register_lowering(tangent_p, lambda ctx, x, *, mark: [x])
