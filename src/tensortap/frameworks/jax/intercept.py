"""Calling a JAX function so that the numerics of its modules come out with its results.

A function that is jitted is compiled anew, with statistics as further outputs (`jax_compiled`).
One that is not jitted runs as it would, operation by operation; what it has compiled inside is
treated as jitted functions are (`jax_inside`). Either way the outputs are those of the plain
call, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from tensortap.frameworks.jax import primitive as jax_tap
from tensortap.frameworks.jax import trees as jax_trees
from tensortap.frameworks.jax.compiled import Compiled, Extra, numbers
from tensortap.frameworks.jax.device_stats import can_reduce, pack
from tensortap.frameworks.jax.harvest import Entry
from tensortap.frameworks.jax.inside import Inside
from tensortap.frameworks.jax.modules import Wanted, instrumented
from tensortap.frameworks.jax.primitive import Mark
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind, Summary
from tensortap.stats.packed import layout, unpack

_PJIT = type(jax.jit(lambda: None))


class Vector:
    """Words on their way from the device; `numpy` waits for them, wherever it is called."""

    __slots__ = ("_array", "_host", "_lock")

    def __init__(self, array: Any) -> None:
        self._array = array
        self._host: np.ndarray[Any, Any] | None = None
        self._lock = threading.Lock()
        if isinstance(array, jax.Array):
            array.copy_to_host_async()

    def ready(self) -> bool:
        """Whether the device is done with them."""
        array = self._array
        return array is None or not isinstance(array, jax.Array) or bool(array.is_ready())

    def numpy(self) -> np.ndarray[Any, Any]:
        """The words; the device's memory is free again."""
        with self._lock:
            if self._host is None:
                # the user's guard is meant for his own transfers
                with jax.transfer_guard("allow"):
                    self._host = np.asarray(self._array).reshape(-1)
                self._array = None
            return self._host


@dataclass(frozen=True, slots=True, repr=False)
class Observation:
    """The statistics of one tensor; `resolve` waits for them, best in another thread.

    `part` tells the tensors of one output, or the entries of an optimizer's state (``mu``);
    `call` is which call of the module it was within the intercepted function.
    """

    kind: Kind
    name: str
    part: str
    type: str
    dtype: str
    shape: tuple[int, ...]
    call: int
    vector: Vector
    start: int = 0
    array: Any = None  # itself, where it is a leaf of a tree: what is inside a function is gone

    def resolve(self) -> Summary | None:
        """The summary; None where the program did not come by (a branch that was not taken)."""
        words = self.vector.numpy()[self.start : self.start + layout(self.dtype).words]
        return unpack(words, self.dtype, self.shape)

    def __repr__(self) -> str:
        part = f" {self.part}" if self.part else ""
        return f"<{self.kind.value} {self.name}{part} call {self.call} {self.dtype}{self.shape}>"


# -- any function ----------------------------------------------------------------------------


class _StandIn:
    """Takes the place of a jitted function inside what wraps it."""

    def __init__(self, compiled: Compiled, found: list[Extra]) -> None:
        self._compiled = compiled
        self._found = found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results, extra = self._compiled(*args, **kwargs)
        self._found.append(extra)
        return results


class Intercept:
    """Calls functions and says what their modules put out.

    `wanted` says of a kind and a name whether it is to be seen; it is asked when a function is
    traced. What could not be seen, and why, is in `unseen`.
    """

    def __init__(self, wanted: Wanted = lambda kind, name: True) -> None:
        self._wanted = wanted
        self._key = f"tracker{next(numbers)}"
        self._compiled: dict[int, tuple[Any, Compiled | None]] = {}
        self._late: list[tuple[Entry, Vector]] = []
        self._lock = threading.Lock()
        self._inside = Inside(self.say)
        self.unseen: list[str] = []

    def say(self, reason: str) -> None:
        """Note, once, what could not be seen or done."""
        if reason and reason not in self.unseen:
            self.unseen.append(reason)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """What is traced here is marked; JAX's caches keep it apart from everything else."""
        with set_xla_metadata(tensortap=self._key), instrumented(self._wanted):
            yield

    def __call__(self, fn: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Observation]]:
        """What ``fn(*args, **kwargs)`` returns, and what was seen in it."""
        while isinstance(fn, functools.partial):
            args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
        if isinstance(fn, types.MethodType) and type(fn.__func__) is _PJIT:
            args, fn = (fn.__self__, *args), fn.__func__
        jax_tap.deliver_to(self._take_late)
        extras: list[Extra] = []
        live: list[tuple[Entry, Vector]] = []
        compiled = self._compile(fn)
        if compiled is not None:
            results = self._call_compiled(compiled, args, kwargs, extras)
        else:
            with self._opened(fn, extras) as opened:
                # what lies around the compiled function computes nothing
                call = fn if opened else functools.partial(self._call_plain, live, fn)
                results = call(*args, **kwargs)
        if any(extra.about.calls_back for extra in extras) or (
            compiled is None and jax_tap.may_call_back()
        ):
            jax.block_until_ready(results)
            jax.effects_barrier()
        return results, self._observations(extras, live)

    def _compile(self, fn: Any) -> Compiled | None:
        """`fn` compiled with statistics, if it is a jitted function."""
        if type(fn) is not _PJIT or not hasattr(fn, "_jit_info"):
            return None
        known = self._compiled.get(id(fn))
        if known is None:
            known = self._compiled[id(fn)] = fn, Compiled(fn, self)  # fn: its id stays its own
        return known[1]

    def _call_compiled(
        self, compiled: Compiled, args: Any, kwargs: Any, extras: list[Extra]
    ) -> Any:
        try:
            results, extra = compiled(*args, **kwargs)
        except Exception as error:
            if pipeline.strict:
                raise
            failure = f"{type(error).__name__}: {error}"
        else:
            extras.append(extra)
            return results
        results = compiled.fn(*args, **kwargs)  # if the error is the user's, here it is again
        self.say(f"{getattr(compiled.fn, '__name__', 'a function')}: {failure}")
        return results

    @contextlib.contextmanager
    def _opened(self, fn: Any, extras: list[Extra]) -> Iterator[bool]:
        """An object around a jitted function (`nnx.jit`, `eqx.filter_jit`) calls ours instead."""
        inner = {
            name: value
            for name, value in getattr(fn, "__dict__", {}).items()
            if name != "__wrapped__" and type(value) is _PJIT and hasattr(value, "_jit_info")
        }
        try:
            for name, value in inner.items():
                compiled = self._compile(value)
                assert compiled is not None
                # not on a copy: such objects tell themselves by their identity
                object.__setattr__(fn, name, _StandIn(compiled, extras))
            yield bool(inner)
        finally:
            for name, value in inner.items():
                object.__setattr__(fn, name, value)

    def _call_plain(
        self, live: list[tuple[Entry, Vector]], fn: Any, *args: Any, **kwargs: Any
    ) -> Any:
        def receive(mark: Mark, x: Any) -> None:
            if can_reduce(x.dtype):
                live.append((Entry(mark, x.dtype.name, tuple(x.shape)), Vector(_pack(x))))
            else:
                self.say(f"{mark.name}: no statistics for dtype {x.dtype}")

        def take(entry: Entry, vector: Any) -> None:
            live.append((entry, Vector(vector)))

        with self.tracing(), jax_tap.receiving(receive), self._inside.running(take):
            return fn(*args, **kwargs)

    def _take_late(self, mark: Mark, dtype: str, shape: tuple[int, ...], words: Any) -> None:
        with self._lock:
            self._late.append((Entry(mark, dtype, shape), Vector(np.asarray(words))))

    # -- observations --------------------------------------------------------------------

    def _observations(
        self, extras: list[Extra], live: list[tuple[Entry, Vector]]
    ) -> list[Observation]:
        with self._lock:
            late, self._late = self._late, []
        found: list[tuple[Entry, Vector, int]] = []
        for extra in extras:
            for reason in extra.about.unseen:
                self.say(reason)
            vector, start = Vector(extra.vector), 0
            for entry in extra.about.entries:
                found.append((entry, vector, start))
                start += entry.words
        found += [(entry, vector, 0) for entry, vector in (*_once(live), *_in_order(_once(late)))]
        calls = number_calls([entry for entry, _, _ in found])
        observations = []
        for (entry, vector, start), first in zip(found, calls, strict=True):
            words = layout(entry.dtype).words
            mark = entry.mark
            observations += [
                Observation(mark.kind, mark.name, mark.part, mark.type, entry.dtype, entry.shape,
                            first + row, vector, start + row * words)
                for row in range(entry.rows)
            ]  # fmt: skip
        return observations

    def observe_trees(
        self, params: Any = None, optimizer_state: Any = None, grads: Any = None, *,
        like: Any = None,
    ) -> list[Observation]:  # fmt: skip
        """The statistics of parameters, optimizer state and weight gradients, in one go.

        `like` are parameters that name the optimizer's state where `params` are not given.
        """
        names: list[tuple[Kind, str, str]] = []
        arrays: list[Any] = []
        for kind, tree in ((Kind.WEIGHT, params), (Kind.WEIGHT_GRADIENT, grads)):
            paths, leaves = jax_trees.arrays_of(tree)
            names += [(kind, jax_trees.parameter_name(path), "") for path in paths]
            arrays += leaves
        if optimizer_state is not None:
            known = params if params is not None else like if like is not None else grads
            parameters = jax_trees.bare_paths(jax_trees.arrays_of(known)[0])
            paths, leaves = jax_trees.arrays_of(optimizer_state)
            names += [
                (Kind.OPTIMISER_STATE, *jax_trees.state_name(path, parameters)) for path in paths
            ]
            arrays += leaves
        wanted = [i for i, (kind, name, _) in enumerate(names) if self._wanted(kind, name)]
        if not wanted:
            return []
        chosen = [arrays[i] for i in wanted]
        # the user's guard is meant for his own transfers
        with jax.transfer_guard("allow"):
            vector, start = Vector(jax_trees.pack_all(chosen)), 0
        observations = []
        for i, array in zip(wanted, chosen, strict=True):
            kind, name, part = names[i]
            dtype, shape = _describe(array)
            observations.append(
                Observation(kind, name, part, "", dtype, shape, 0, vector, start, array)
            )
            start += layout(dtype).words
        return observations


_pack = jax.jit(pack)


def _describe(array: Any) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape that an array has inside a jitted function."""
    dtype = jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(array))
    return dtype.name, tuple(np.shape(array))


def _once(run: list[tuple[Entry, Vector]]) -> Iterator[tuple[Entry, Vector]]:
    """What a function did, without what its backward pass did again (`jax.checkpoint`).

    A value is computed again when a backward pass is under way and its gradient is still owed.
    """
    backward = False
    owed: dict[int, int] = {}
    for entry, vector in run:
        uid = entry.mark.uid
        if entry.mark.kind is Kind.GRADIENT:
            backward = True
            owed[uid] = owed.get(uid, 0) - 1
        elif backward and owed.get(uid, 0) > 0:
            continue
        else:
            owed[uid] = owed.get(uid, 0) + 1
        yield entry, vector


def _in_order(run: Iterable[tuple[Entry, Vector]]) -> list[tuple[Entry, Vector]]:
    """What compiled code called back with, in the order of its program: it calls in any order.

    The n-th time that a mark is met is the n-th run of its code. Gradients come last to first
    if all values came before them: then the backward pass is a function of its own.
    """
    listed = list(run)
    places: dict[tuple[int, Kind], list[int]] = {}
    for index, (entry, _) in enumerate(listed):
        places.setdefault((entry.mark.uid, entry.mark.kind), []).append(index)
    keys: dict[int, tuple[int, int, bool]] = {}
    for (uid, kind), indices in places.items():
        values = places.get((uid, Kind.ACTIVATION), [])
        gradient = kind is Kind.GRADIENT
        backwards = gradient and bool(values) and max(values) < indices[0]
        for turn, index in enumerate(reversed(indices) if backwards else indices):
            keys[index] = turn, uid, gradient
    return [listed[index] for index in sorted(keys, key=keys.__getitem__)]


def number_calls(entries: Iterable[Entry]) -> list[int]:
    """The index of the (first) call of each entry, of those under one name.

    Activations count in the order of the program. A gradient has the number of its activation,
    and a backward pass meets the calls last to first.
    """
    listed = list(entries)
    first: dict[int, int] = {}
    counts: dict[tuple[str, str], int] = {}
    open_calls: dict[int, list[int]] = {}  # whose gradients are still to come

    def number(index: int) -> None:
        mark = listed[index].mark
        key = mark.name, mark.part
        first[index] = counts.get(key, 0)
        counts[key] = first[index] + listed[index].rows

    alone = []
    for index, entry in enumerate(listed):
        uid = entry.mark.uid
        if entry.mark.kind is Kind.ACTIVATION:
            number(index)
            open_calls.setdefault(uid, []).append(first[index])
        elif open_calls.get(uid):
            first[index] = open_calls[uid].pop()
        else:
            alone.append(index)
    counts.clear()
    for index in sorted(alone, key=lambda i: (listed[i].mark.uid, -i)):
        number(index)
    return [first[index] for index in range(len(listed))]
