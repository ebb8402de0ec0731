"""Evaluation of a marked JAX program that computes statistics where the marks are.

The program is evaluated operation by operation inside the function that is being compiled. Inner
jits are inlined. A `scan` gets one more stacked output for each mark in its body, a `cond` one for
each mark in any of its branches, and `remat` likewise. Activations that a backward pass
recomputes are not observed a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import Sharding

from tensortap.core.record import Kind
from tensortap.rooms.track.jax.device_stats import pack
from tensortap.rooms.track.jax.marks import MarkedValue, can_observe, value_p


class Harvest:
    """The marked values of a program, and their packed statistics."""

    def __init__(self) -> None:
        self.values: list[MarkedValue] = []
        self.vectors: list[Any] = []

    def add(self, value: MarkedValue, vector: Any) -> None:
        """Add the packed statistics of a marked value."""
        self.values.append(value)
        self.vectors.append(vector)


def evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], harvest: Harvest, again: bool = False
) -> list[Any]:
    """Return the outputs of a program and fill `harvest`.

    `again` says that the program recomputes activations that have been observed before.
    """
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        # the metadata only separates marked traces in JAX's caches; the program must not have it
        with eqn.ctx.manager, set_xla_metadata(tensortap=None):
            if eqn.primitive is value_p:
                outputs, x, mark = inputs, inputs[0], eqn.params["mark"]
                if (mark.kind is Kind.GRADIENT or not again) and can_observe(x, mark):
                    harvest.add(MarkedValue(mark, x.dtype.name, tuple(x.shape)), pack(x))
            elif _is_marked(eqn):
                opener = _OPENERS.get(eqn.primitive.name, _leave)
                outputs = opener(eqn, inputs, harvest, again)
            else:
                outputs = bind(eqn, inputs)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def bind(eqn: Any, inputs: list[Any], **changed: Any) -> list[Any]:
    """Run an operation of a program, with some of its parameters changed."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    outputs = eqn.primitive.bind(*inputs, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


# -- operations that contain programs --------------------------------------------------------


def _is_marked(eqn: Any) -> bool:
    return any(
        inner.primitive is value_p or _is_marked(inner)
        for program in _programs_in(eqn.params)
        for inner in program.eqns
    )


def _programs_in(params: dict[str, Any]) -> list[Jaxpr]:
    programs = []
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                programs.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                programs.append(item)
    return programs


def _leave(eqn: Any, inputs: list[Any], harvest: Harvest, again: bool) -> list[Any]:
    """Run the operation unchanged: the marks in it are noted as unseen."""
    return bind(eqn, inputs)


def _inline(eqn: Any, inputs: list[Any], harvest: Harvest, again: bool) -> list[Any]:
    """Evaluate the program in place of the call, as XLA would inline it."""
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    if isinstance(inner, ClosedJaxpr):
        return evaluate(inner.jaxpr, inner.consts, inputs, harvest, again)
    return _leave(eqn, inputs, harvest, again)


def _jit(eqn: Any, inputs: list[Any], harvest: Harvest, again: bool) -> list[Any]:
    def constrained(values: list[Any], shardings: Sequence[Any]) -> list[Any]:
        return [
            jax.lax.with_sharding_constraint(value, sharding)
            if isinstance(sharding, Sharding)
            else value
            for value, sharding in zip(values, shardings, strict=True)
        ]

    inputs = constrained(inputs, eqn.params["in_shardings"])
    outputs = _inline(eqn, inputs, harvest, again)
    return constrained(outputs, eqn.params["out_shardings"])


def _retrace(jaxpr: Any, consts: Sequence[Any], again: bool) -> tuple[ClosedJaxpr, Harvest]:
    """Return the same program with the statistics as additional outputs."""
    inner = Harvest()

    def run(*args: Any) -> list[Any]:
        inner.__init__()  # type: ignore[misc]  # JAX may trace this several times
        return evaluate(jaxpr, consts, args, inner, again) + inner.vectors

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
             for v in jaxpr.invars]  # fmt: skip
    return jax.make_jaxpr(run)(*avals), inner


def _take(
    eqn: Any, outputs: list[Any], values: Sequence[MarkedValue], harvest: Harvest
) -> list[Any]:
    """Add the statistics among the outputs of an operation, and return its own outputs."""
    own = len(eqn.outvars)
    for value, vector in zip(values, outputs[own:], strict=True):
        harvest.add(value, vector)
    return outputs[:own]


def _scan(eqn: Any, inputs: list[Any], harvest: Harvest, again: bool) -> list[Any]:
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    closed, inner = _retrace(body.jaxpr, body.consts, again)
    values = [replace(value, loops=(length, *value.loops)) for value in inner.values]
    return _take(eqn, bind(eqn, inputs, jaxpr=closed), values, harvest)


def _cond(eqn: Any, inputs: list[Any], harvest: Harvest, again: bool) -> list[Any]:
    retraced = [_retrace(b.jaxpr, b.consts, again) for b in eqn.params["branches"]]
    values = [value for _, inner in retraced for value in inner.values]
    own = len(eqn.outvars)

    def branch(index: int) -> ClosedJaxpr:
        closed, inner = retraced[index]
        start = sum(len(earlier.values) for _, earlier in retraced[:index])

        def run(*args: Any) -> list[Any]:
            outputs = jaxpr_as_fun(closed)(*args)
            # zeros mean that the branch was not taken
            vectors = [jnp.zeros((*v.loops, v.size), jnp.uint32) for v in values]
            vectors[start : start + len(inner.values)] = outputs[own:]
            return [*outputs[:own], *vectors]

        program: ClosedJaxpr = jax.make_jaxpr(run)(*closed.in_avals)
        return program

    outputs = bind(eqn, inputs, branches=tuple(branch(i) for i in range(len(retraced))))
    return _take(eqn, outputs, values, harvest)


def _remat(eqn: Any, inputs: list[Any], harvest: Harvest, again: bool) -> list[Any]:
    again = again or bool(eqn.params.get("differentiated"))
    closed, inner = _retrace(eqn.params["jaxpr"], (), again)
    if closed.consts:
        return _leave(eqn, inputs, harvest, again)
    return _take(eqn, bind(eqn, inputs, jaxpr=closed.jaxpr), inner.values, harvest)


_OPENERS: dict[str, Callable[[Any, list[Any], Harvest, bool], list[Any]]] = {
    "jit": _jit,
    "closed_call": _inline,
    "custom_jvp_call": _inline,
    "custom_vjp_call": _inline,
    "scan": _scan,
    "cond": _cond,
    "checkpoint": _remat,
    "remat2": _remat,
}
