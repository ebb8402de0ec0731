"""Marks on values inside JAX functions: an identity operation that survives transformations.

`mark` returns its argument. In the traced program it labels an activation, and once the program
is differentiated also the gradient of that activation. `tensortap.rooms.track.jax.harvest` turns
marks into outputs. Marks on concrete values go to their `Collector`. Those that a harvest cannot
reach (in the body of a `while_loop`, or in what JAX compiles on its own) are noted as unseen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tensortap.core.record import Kind
from tensortap.rooms.track.jax.device_stats import can_reduce, pack
from tensortap.rooms.track.packed import layout

HIDDEN = (
    "not observed: it runs in a while_loop or over several devices, or in what JAX compiles inside "
    "a function that is not jitted; jit the whole function, or use tap.catch in it"
)


@dataclass(frozen=True, slots=True)
class ValueMark:
    """The label of an activation or of its gradient, which share `uid`.

    `activation` and `gradient` say which of the two are wanted.
    """

    kind: Kind
    name: str
    type: str
    uid: int
    activation: bool
    gradient: bool
    collector: Collector

    @property
    def wanted(self) -> bool:
        """Whether the labeled value itself is to be observed."""
        return self.gradient if self.kind is Kind.GRADIENT else self.activation


@dataclass(frozen=True, slots=True)
class MarkedValue:
    """A mark, the dtype and shape of its value, and the lengths of enclosing scans."""

    mark: ValueMark
    dtype: str
    shape: tuple[int, ...]
    loops: tuple[int, ...] = ()

    @property
    def calls(self) -> int:
        """Number of times that the value is computed: once per iteration."""
        return math.prod(self.loops)

    @property
    def words(self) -> int:
        """Size of the statistics of all calls, in words."""
        return self.calls * self.size

    @property
    def size(self) -> int:
        """Size of the statistics of one call, in words."""
        return layout(self.dtype).words


class Collector:
    """Takes the packed statistics of marks that are no outputs of a program.

    `unseen` maps names to what could not be observed, or not without side effects, and why.
    """

    def __init__(self) -> None:
        self.unseen: dict[str, str] = {}
        self.eager: list[tuple[MarkedValue, Any]] = []
        self.modules = 0  # calls of modules that were traced or run

    def note(self, name: str, reason: str) -> None:
        """Note what the user should know about a name."""
        known = self.unseen.get(name)
        if known is None or reason not in known:
            self.unseen[name] = reason if known is None else f"{known}; {reason}"

    def taken(self) -> list[tuple[MarkedValue, Any]]:
        """Return what eager code has delivered since the last time."""
        eager, self.eager = self.eager, []
        return eager


_uids = itertools.count()

value_p = Primitive("tensortap_value")
tangent_p = Primitive("tensortap_tangent")


def mark(
    x: Any, name: str, cls: str, activation: bool, gradient: bool, collector: Collector
) -> Any:
    """Return `x`, marked as a module's output; differentiation marks its gradient as well."""
    label = ValueMark(Kind.ACTIVATION, name, cls, next(_uids), activation, gradient, collector)
    return value_p.bind(x, mark=label)


def can_observe(x: Any, label: ValueMark) -> bool:
    """Return whether a marked value is wanted and has statistics; note if it has none."""
    if label.wanted and not can_reduce(x.dtype):
        label.collector.note(label.name, f"no statistics for dtype {x.dtype}")
        return False
    return label.wanted


_pack: Callable[[Any], jax.Array] = jax.jit(pack)


def _on_concrete(x: Any, *, mark: ValueMark) -> Any:
    if can_observe(x, mark):
        value = MarkedValue(mark, x.dtype.name, tuple(x.shape))
        mark.collector.eager.append((value, _pack(x)))
    return x


value_p.def_impl(_on_concrete)
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


def _compiled(ctx: Any, x: Any, *, mark: ValueMark) -> list[Any]:
    if mark.wanted:
        mark.collector.note(mark.name, HIDDEN)
    return [x]


ad.primitive_jvps[value_p] = _jvp
ad.deflinear2(tangent_p, _transpose)
batching.defvectorized(value_p)
batching.defvectorized(tangent_p)
mlir.register_lowering(value_p, _compiled)
mlir.register_lowering(tangent_p, lambda ctx, x, *, mark: [x])
