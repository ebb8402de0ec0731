"""Marks in a JAX program become outputs of it: statistics, computed where the value is.

The program is run again, operation by operation, inside the function that is being compiled.
An inner `jit` is opened; a `scan` gets one more stacked output for each mark in its body, a
`cond` one for each mark in any of its branches, `remat` likewise. What a backward pass computes
a second time is not counted a second time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from tensortap.frameworks.jax.device_stats import can_reduce, pack
from tensortap.frameworks.jax.primitive import Mark, value_p
from tensortap.record import Kind
from tensortap.stats.packed import layout


@dataclass(frozen=True, slots=True)
class Entry:
    """One mark and what lies under it; `lead` are the loops around it, a call an iteration."""

    mark: Mark
    dtype: str
    shape: tuple[int, ...]
    lead: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """How many calls there are."""
        return math.prod(self.lead)

    @property
    def words(self) -> int:
        """How many words the statistics of all calls take."""
        return self.rows * layout(self.dtype).words


class Harvest:
    """What evaluating a program gave: its entries, their vectors, and what could not be seen."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.vectors: list[Any] = []
        self.unseen: list[str] = []
        self.calls_back = False

    def add(self, entry: Entry, vector: Any) -> None:
        self.entries.append(entry)
        self.vectors.append(vector)


def evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], found: Harvest, again: bool = False
) -> list[Any]:
    """The outputs of a program; `again` says that its activations were seen before."""
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        # what kept its trace apart in JAX's caches is no part of the program
        with eqn.ctx.manager, set_xla_metadata(tensortap=None):
            if eqn.primitive is value_p:
                outputs = [_see(inputs[0], eqn.params["mark"], found, again)]
            elif _marked(eqn):
                outputs = run_opened(eqn, inputs, found, again)
            else:
                outputs = _bind(eqn, inputs)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _see(x: Any, mark: Mark, found: Harvest, again: bool) -> Any:
    if not mark.wanted or (again and mark.kind is not Kind.GRADIENT):
        return x
    if not can_reduce(x.dtype):
        found.unseen.append(f"{mark.name}: no statistics for dtype {x.dtype}")
        return x
    found.add(Entry(mark, x.dtype.name, tuple(x.shape)), pack(x))
    return x


def _bind(eqn: Any, inputs: list[Any], **changed: Any) -> list[Any]:
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    if isinstance(params, tuple):  # before JAX 0.8, functions came apart from the rest
        functions, params = params
        inputs = [*functions, *inputs]
    outputs = eqn.primitive.bind(*inputs, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


# -- programs inside programs ----------------------------------------------------------------


def _marked(eqn: Any) -> bool:
    return any(has_marks(inner) for inner in programs_in(eqn.params))


def has_marks(jaxpr: Any) -> bool:
    """Whether anything is marked in a program."""
    return any(eqn.primitive is value_p or _marked(eqn) for eqn in jaxpr.eqns)


def programs_in(params: dict[str, Any]) -> list[Any]:
    """The programs among the parameters of an operation."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def run_opened(eqn: Any, inputs: list[Any], found: Harvest, again: bool = False) -> list[Any]:
    """The outputs of an operation that has marked programs in it."""
    opener = _OPENERS.get(eqn.primitive.name, _leave)
    return opener(eqn, inputs, found, again)


def _leave(eqn: Any, inputs: list[Any], found: Harvest, again: bool) -> list[Any]:
    """As it is: the marks inside call back when they run."""
    found.calls_back = True
    return _bind(eqn, inputs)


def _inline(eqn: Any, inputs: list[Any], found: Harvest, again: bool) -> list[Any]:
    """Its operations one by one: XLA would have put them in its place as well."""
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr") or eqn.params.get("fun_jaxpr")
    if isinstance(inner, ClosedJaxpr):
        return evaluate(inner.jaxpr, inner.consts, inputs, found, again)
    if isinstance(inner, Jaxpr) and not inner.constvars:
        return evaluate(inner, (), inputs, found, again)
    return _leave(eqn, inputs, found, again)


def _jit(eqn: Any, inputs: list[Any], found: Harvest, again: bool) -> list[Any]:
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if all(type(s).__name__ == "UnspecifiedValue" for s in shardings):
        return _inline(eqn, inputs, found, again)
    return _leave(eqn, inputs, found, again)


def _retrace(
    jaxpr: Any, consts: Sequence[Any], found: Harvest, again: bool
) -> tuple[ClosedJaxpr, Harvest]:
    """The same program with the statistics as further outputs."""
    inner = Harvest()

    def run(*args: Any) -> list[Any]:
        inner.__init__()  # type: ignore[misc]  # traced anew: from the start
        return evaluate(jaxpr, consts, args, inner, again) + inner.vectors

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
             for v in jaxpr.invars]  # fmt: skip
    closed = jax.make_jaxpr(run)(*avals)
    found.unseen += inner.unseen
    found.calls_back |= inner.calls_back
    return closed, inner


def _scan(eqn: Any, inputs: list[Any], found: Harvest, again: bool) -> list[Any]:
    body = eqn.params["jaxpr"]
    closed, inner = _retrace(body.jaxpr, body.consts, found, again)
    outputs = _bind(eqn, inputs, jaxpr=closed)
    length = eqn.params["length"]
    own = len(eqn.outvars)
    for entry, vector in zip(inner.entries, outputs[own:], strict=True):
        found.add(Entry(entry.mark, entry.dtype, entry.shape, (length, *entry.lead)), vector)
    return outputs[:own]


def _cond(eqn: Any, inputs: list[Any], found: Harvest, again: bool) -> list[Any]:
    opened = [_retrace(b.jaxpr, b.consts, found, again) for b in eqn.params["branches"]]
    entries = [entry for _, inner in opened for entry in inner.entries]

    def branch(number: int) -> ClosedJaxpr:
        closed, inner = opened[number]
        before = sum(len(i.entries) for _, i in opened[:number])
        own = len(eqn.outvars)

        def run(*args: Any) -> list[Any]:
            outputs = jaxpr_as_fun(closed)(*args)
            # zeros say that nothing was reduced: the branch was not taken
            extra = [jnp.zeros((*e.lead, layout(e.dtype).words), jnp.uint32) for e in entries]
            extra[before : before + len(inner.entries)] = outputs[own:]
            return [*outputs[:own], *extra]

        found: ClosedJaxpr = jax.make_jaxpr(run)(*closed.in_avals)
        return found

    branches = tuple(branch(i) for i in range(len(opened)))
    outputs = _bind(eqn, inputs, branches=branches)
    own = len(eqn.outvars)
    for entry, vector in zip(entries, outputs[own:], strict=True):
        found.add(entry, vector)
    return outputs[:own]


def _remat(eqn: Any, inputs: list[Any], found: Harvest, again: bool) -> list[Any]:
    jaxpr = eqn.params["jaxpr"]
    again = again or bool(eqn.params.get("differentiated"))
    closed, inner = _retrace(jaxpr, (), found, again)
    if closed.consts:
        return _leave(eqn, inputs, found, again)
    outputs = _bind(eqn, inputs, jaxpr=closed.jaxpr)
    own = len(eqn.outvars)
    for entry, vector in zip(inner.entries, outputs[own:], strict=True):
        found.add(entry, vector)
    return outputs[:own]


_Opener = Callable[[Any, list[Any], Harvest, bool], list[Any]]
_OPENERS: dict[str, _Opener] = {
    "jit": _jit,
    "pjit": _jit,
    "closed_call": _inline,
    "core_call": _inline,
    "custom_jvp_call": _inline,
    "custom_vjp_call": _inline,
    "custom_vjp_call_jaxpr": _inline,
    "scan": _scan,
    "cond": _cond,
    "checkpoint": _remat,
    "remat": _remat,
    "remat2": _remat,
}
