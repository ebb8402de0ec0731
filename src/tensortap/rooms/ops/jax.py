"""Operations of a JAX program: its traced form, evaluated operation by operation.

The function itself runs as always and returns its own results. Before that, its program is traced
and evaluated once more without compiling it, which opens jits, loops and branches. JAX keeps for
each operation of the program the line that made it, and the scopes of modules.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from tensortap.core.errors import CaptureError
from tensortap.rooms.ops.operations import (
    BACKWARD,
    FORWARD,
    NOWHERE,
    RECOMPUTE,
    Operation,
    OperationInput,
    OperationOutput,
    SourceLine,
    folder_of,
)
from tensortap.rooms.track.jax.harvest import bind
from tensortap.stats import summarize_array
from tensortap.values.snapshot import digest_of

if TYPE_CHECKING:
    from tensortap.rooms.ops.ops import OperationRecorder

_EAGER = (
    "its operations are evaluated one by one beside the compiled function, whose last bits may "
    "differ"
)
_EFFECTS = "not observed: it has callbacks that return values, which must not run twice"
_PLUMBING = ("jax", "jaxlib", "flax", "equinox", "haiku", "tensortap")
_WRAPPED = re.compile(r"\w+\(([^()]*)\)")  # jvp(...), transpose(...), of the innermost scope
_CALLS = (
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "checkpoint", "remat", "remat2",
)  # fmt: skip
_VALUES = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, str, bytes, type(None))


def operations(model: Any, observer: OperationRecorder) -> JaxOperationHooks | None:
    """Return hooks that report every operation of a program, which has no model."""
    return JaxOperationHooks(observer) if model is None else None


class JaxOperationHooks:
    """Reports the operations of functions that are called through `intercept`."""

    def __init__(self, observer: OperationRecorder) -> None:
        self._observer = observer

    def attach(self) -> None:
        """Do nothing: JAX has no hooks."""

    def detach(self) -> None:
        """Do nothing."""

    def intercept(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Report the operations of a function, then call it and return its results."""
        if self._observer.capturing:
            name = getattr(function, "__name__", "function")
            try:
                self._report(function, name, args, kwargs)
            except Exception as error:
                self._observer.remarks[name] = f"not observed: {error}"
                self._observer.fault(name, error)
        return function(*args, **kwargs)

    def _report(self, function: Any, name: str, args: Any, kwargs: Any) -> None:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(not isinstance(leaf, _VALUES) for leaf in leaves):
            raise CaptureError("an argument is no tree of arrays and numbers")
        traced = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]

        def run(*arrays: Any) -> Any:
            given = iter(arrays)
            parts = [next(given) if t else x for t, x in zip(traced, leaves, strict=True)]
            positional, named = jax.tree.unflatten(tree, parts)
            return function(*positional, **named)

        arrays = [leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array]
        program = jax.make_jaxpr(run)(*arrays)
        if _has_results_of_callbacks(program.jaxpr):
            raise CaptureError(_EFFECTS)
        self._observer.remarks.setdefault(name, _EAGER)
        Evaluation(self._observer).run(program.jaxpr, program.consts, arrays, Scope())


class Scope(NamedTuple):
    """The place of an operation in the program: the scopes around it, and the line of the call."""

    names: str = ""
    line: SourceLine = NOWHERE


class Evaluation:
    """Evaluates a program eagerly and reports each operation."""

    def __init__(self, observer: OperationRecorder) -> None:
        self._observer = observer
        self._indices: dict[tuple[str, str], int] = {}
        self._openers: dict[str, Callable[[Any, list[Any], Scope], list[Any]]] = {
            **dict.fromkeys(_CALLS, self._inline),
            "scan": self._scan, "cond": self._cond, "while": self._while,
        }  # fmt: skip

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], scope: Scope
    ) -> list[Any]:
        """Return the outputs of a program."""
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            if eqn.effects and not eqn.outvars:  # prints, which the function itself makes
                continue
            inputs = [read(v) for v in eqn.invars]
            inner = _scope_of(eqn, scope)
            opener = self._openers.get(eqn.primitive.name)
            if opener is not None:
                outputs = opener(eqn, inputs, inner)
            else:
                outputs = bind(eqn, inputs)
                self._report(eqn, inputs, outputs, inner)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _inline(self, eqn: Any, inputs: list[Any], scope: Scope) -> list[Any]:
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            inner = eqn.params.get(key)
            if isinstance(inner, ClosedJaxpr):
                return self.run(inner.jaxpr, inner.consts, inputs, scope)
            if isinstance(inner, Jaxpr):
                return self.run(inner, (), inputs, scope)
        raise CaptureError(f"{eqn.primitive.name} has no program")

    def _cond(self, eqn: Any, inputs: list[Any], scope: Scope) -> list[Any]:
        branches = eqn.params["branches"]
        branch = branches[min(max(int(inputs[0]), 0), len(branches) - 1)]
        return self.run(branch.jaxpr, branch.consts, inputs[1:], scope)

    def _while(self, eqn: Any, inputs: list[Any], scope: Scope) -> list[Any]:
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        first, second = inputs[:of_cond], inputs[of_cond : of_cond + of_body]
        carry = inputs[of_cond + of_body :]
        while bool(self.run(cond.jaxpr, cond.consts, [*first, *carry], scope)[0]):
            carry = self.run(body.jaxpr, body.consts, [*second, *carry], scope)
        return carry

    def _scan(self, eqn: Any, inputs: list[Any], scope: Scope) -> list[Any]:
        body, params = eqn.params["jaxpr"], eqn.params
        consts, length = inputs[: params["num_consts"]], params["length"]
        carry = inputs[len(consts) : len(consts) + params["num_carry"]]
        rows = inputs[len(consts) + len(carry) :]
        order = range(length - 1, -1, -1) if params["reverse"] else range(length)
        stacks: list[tuple[int, list[Any]]] = []
        for index in order:
            given = [*consts, *carry, *(row[index] for row in rows)]
            outputs = self.run(body.jaxpr, body.consts, given, scope)
            carry = outputs[: len(carry)]
            stacks.append((index, outputs[len(carry) :]))
        ys = [made for _, made in sorted(stacks, key=lambda pair: pair[0])]
        if not ys:
            avals = [v.aval for v in eqn.outvars[len(carry) :]]
            return [*carry, *(jnp.zeros(aval.shape, aval.dtype) for aval in avals)]
        return [*carry, *(jnp.stack(column) for column in zip(*ys, strict=True))]

    def _report(self, eqn: Any, inputs: list[Any], outputs: list[Any], scope: Scope) -> None:
        module = ".".join(filter(None, _plain(scope.names).split("/")))
        phase = BACKWARD if "transpose(" in scope.names else FORWARD
        if "rematted_computation" in scope.names:
            phase = RECOMPUTE
        at = phase, module or scope.line.function
        index = self._indices[at] = self._indices.get(at, -1) + 1
        names = [chr(ord("a") + i % 26) for i in range(len(inputs))]
        several = len(outputs) > 1
        self._observer.operation(Operation(
            eqn.primitive.name, f"jax.lax.{eqn.primitive.name}", phase, module, 0, index,
            scope.line, [_input(*pair) for pair in zip(names, inputs, strict=True)],
            [_output(f"[{i}]" if several else "", x) for i, x in enumerate(outputs)],
            {key: value for key, value in eqn.params.items() if isinstance(value, (int, float))},
        ))  # fmt: skip


def _has_results_of_callbacks(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        inner = [x for value in eqn.params.values()
                 for x in (value if isinstance(value, (tuple, list)) else (value,))]  # fmt: skip
        programs = [getattr(each, "jaxpr", each) for each in inner]
        if any(_has_results_of_callbacks(each) for each in programs if hasattr(each, "eqns")):
            return True
        if eqn.primitive.name == "io_callback":
            return True
    return False


# -- places -------------------------------------------------------------------------------------


def _scope_of(eqn: Any, outer: Scope) -> Scope:
    info = eqn.source_info
    names = "/".join(filter(None, (outer.names, str(info.name_stack))))
    return Scope(names, _line(info.traceback) or outer.line)


def _line(traceback: Any) -> SourceLine | None:
    """Return the innermost line of the user's program."""
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(("<", *_folders(len(sys.modules)))):
            return SourceLine(frame.file_name, frame.line_num, frame.function_name)
    return None


@functools.lru_cache(1)
def _folders(modules: int) -> tuple[str, ...]:
    """Return the folders of libraries that run a program; again once more are loaded."""
    return tuple(folder_of(name) for name in _PLUMBING if name in sys.modules)


@functools.lru_cache(4096)
def _plain(names: str) -> str:
    """Return a path of scopes without the transformations around it."""
    while (shorter := _WRAPPED.sub(r"\1", names)) != names:
        names = shorter
    return names


# -- values -------------------------------------------------------------------------------------


def _array(value: Any) -> Any:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None  # keys of random numbers
    return np.asarray(value)


def _digest(array: Any) -> bytes | None:
    return None if array is None else digest_of(array)


def _input(name: str, value: Any) -> OperationInput:
    array = _array(value)
    dtype, shape = ("", ()) if array is None else (array.dtype.name, tuple(array.shape))
    return OperationInput(name, dtype, shape, _digest(array), id(value), lambda: array)


def _output(path: str, value: Any) -> OperationOutput:
    array = _array(value)
    if array is None:
        return OperationOutput(
            path, str(value.dtype), tuple(value.shape), None, None, 0, lambda: None
        )
    digest, stats = _digest(array), summarize_array(array)
    shape = tuple(array.shape)
    return OperationOutput(path, array.dtype.name, shape, digest, stats, id(value), lambda: array)
