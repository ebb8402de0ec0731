"""Calling a JAX function and observing the outputs and gradients of its modules.

A jitted function is compiled a second time with statistics as additional outputs
(`instrumented_jit`), and its results stay bit-identical. A function that is not jitted runs
operation by operation. Whatever JAX compiles inside it (jits, scans, loops, branches) is observed
by callbacks, and its results may differ in the last bits: `unseen` says so.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from tensortap.core.record import Kind
from tensortap.rooms.track.jax.device_stats import summary_at
from tensortap.rooms.track.jax.instrumented_jit import (
    InstrumentedJit,
    PackedOutputs,
    is_jitted,
    jit_options,
)
from tensortap.rooms.track.jax.marks import Collector, MarkedValue
from tensortap.rooms.track.jax.modules import OnError, Wants, marked_modules
from tensortap.rooms.track.observing import Observed
from tensortap.stats.packed import layout
from tensortap.values.jax.adapter import Deferred
from tensortap.values.protocol import PendingSummary

NOT_JITTED = (
    "it is not jitted: the jits, scans, loops and branches in it are observed by callbacks, and "
    "their results may differ in the last bits; jit the whole function to keep them bit-identical"
)
_COMPILED = (
    "not observed: it has been compiled with jit(f).lower().compile(); pass the jitted function "
    "itself, or use tap.catch in it"
)
_UNKNOWN_OPTIONS = "not observed: this version of JAX does not tell how it was jitted"

T = TypeVar("T")
_keys = itertools.count()


class Observation(NamedTuple):
    """An observed tensor, its statistics, and the tensor itself if it is the leaf of a tree."""

    observed: Observed
    pending: PendingSummary
    array: Any = None


class Intercept:
    """Calls functions and returns the observations of what their modules compute.

    `wants` says for a kind and a name whether to observe it; it is asked when a function is
    traced. `on_error` gets the errors of observing. `unseen` maps names to what could not be
    observed, or not without side effects, and why; `remarks` what else the user should know.
    """

    def __init__(
        self, wants: Wants = lambda kind, name: True, on_error: OnError = lambda name, error: None
    ) -> None:
        self._wants = wants
        self._on_error = on_error
        self._key = f"tracker{next(_keys)}"
        self._instrumented: dict[int, InstrumentedJit] = {}  # by id; each keeps its function alive
        self._collector = Collector()
        self._waits = False  # for callbacks of the function that is being called
        self.unseen = self._collector.unseen
        self.remarks: dict[str, str] = {}

    @property
    def has_modules(self) -> bool:
        """True once an intercepted function has called a module."""
        return self._collector.modules > 0

    @contextlib.contextmanager
    def _marking(self) -> Iterator[None]:
        """Mark what is traced here; the metadata keeps it separate in JAX's caches."""
        marked = marked_modules(self._wants, self._on_error, self._collector)
        with set_xla_metadata(tensortap=self._key), marked:
            yield

    def __call__(self, fn: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Observation]]:
        """Return the results of ``fn(*args, **kwargs)``, and the observations."""
        while isinstance(fn, functools.partial):
            args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
        if isinstance(fn, types.MethodType) and is_jitted(fn.__func__):
            args, fn = (fn.__self__, *args), fn.__func__
        self._collector.taken()  # of a call that raised
        self._waits = False
        outputs: list[PackedOutputs] = []
        if is_jitted(fn):
            results = self._call_jitted(fn, outputs, *args, **kwargs)
        elif isinstance(fn, jax.stages.Compiled):
            self._collector.note(getattr(fn, "__name__", "function"), _COMPILED)
            results = fn(*args, **kwargs)
        else:
            with self._replacing_jitted(fn, outputs) as replaced:
                # a wrapper of a jitted function computes nothing itself
                call = fn if replaced else functools.partial(self._call_eagerly, fn)
                results = call(*args, **kwargs)
        if self._waits:
            jax.block_until_ready(results)
            jax.effects_barrier()
        return results, self._observations(outputs)

    def _call_jitted(
        self, fn: Any, outputs: list[PackedOutputs], /, *args: Any, **kwargs: Any
    ) -> Any:
        instrumented = self._instrumented.get(id(fn))
        if instrumented is None:
            options = jit_options(fn)
            if options is None:
                self._collector.note(getattr(fn, "__name__", "function"), _UNKNOWN_OPTIONS)
                return fn(*args, **kwargs)
            instrumented = InstrumentedJit(fn, options, self._marking, self.remarks.__setitem__)
            self._instrumented[id(fn)] = instrumented
        before = self._collector.callbacks
        try:
            results, packed = instrumented(*args, **kwargs)
        except Exception as error:
            arrays = jax.tree.leaves((args, kwargs))
            if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
                raise  # it failed after it had taken the arrays: they cannot be used again
            failure = error
        else:
            outputs.append(packed)
            instrumented.calls_back |= self._collector.callbacks > before
            self._waits |= instrumented.calls_back
            return results
        results = fn(*args, **kwargs)  # raises again if the error is the user's
        self._collector.note(
            instrumented.name, f"not observed: {type(failure).__name__}: {failure}"
        )
        self._on_error(instrumented.name, failure)
        return results

    @contextlib.contextmanager
    def _replacing_jitted(self, fn: Any, outputs: list[PackedOutputs]) -> Iterator[bool]:
        """Make a wrapper of a jitted function (`nnx.jit`, `eqx.filter_jit`) call ours instead."""
        inner = {
            name: value
            for name, value in getattr(fn, "__dict__", {}).items()
            if name != "__wrapped__" and is_jitted(value)
        }
        try:
            for name, value in inner.items():
                # not on a copy: the identity of such wrappers matters
                replacement = functools.partial(self._call_jitted, value, outputs)
                object.__setattr__(fn, name, replacement)
            yield bool(inner)
        finally:
            for name, value in inner.items():
                object.__setattr__(fn, name, value)

    def _call_eagerly(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        before = self._collector.callbacks
        with self._marking():
            results = fn(*args, **kwargs)
        self._waits = self._collector.callbacks > 0
        if self._collector.callbacks > before:
            self._collector.note(getattr(fn, "__name__", "function"), NOT_JITTED)
        return results

    def _observations(self, outputs: list[PackedOutputs]) -> list[Observation]:
        observed: list[tuple[MarkedValue, Deferred, int]] = []
        for packed in outputs:
            vector, start = Deferred(packed.vector, packed.vector.nbytes), 0
            for value in packed.info.values:
                observed.append((value, vector, start))
                start += value.words
        eager, called_back = self._collector.taken()
        by_device: dict[int, list[tuple[MarkedValue, Any]]] = {0: []}
        for value, words in called_back:
            by_device.setdefault(value.run.device, []).append((value, words))
        observations: list[Observation] = []
        for device, delivered in sorted(by_device.items()):  # each counts its own calls
            found = [] if device else observed
            own = [] if device else list(_without_recomputed(eager))
            own += _in_program_order(_without_recomputed(delivered))
            found += [(value, Deferred(words, words.nbytes), 0) for value, words in own]
            first = _first_calls(value for value, _, _ in found)
            for (value, vector, start), call in zip(found, first, strict=True):
                observations += _calls_of(value, vector, start, call)
        return observations


def _calls_of(value: MarkedValue, vector: Deferred, start: int, call: int) -> Iterator[Observation]:
    """Yield the calls of a value, from this one on."""
    mark, run, dtype, shape = value.mark, value.run, value.dtype, value.shape
    for i in range(value.calls):
        number = (call + i) * run.devices + run.device
        seen = Observed(mark.name, mark.kind, number, mark.type, dtype, shape, run.shard, run.tags)
        place = start + i * layout(dtype).words
        yield Observation(seen, summary_at(vector, place, dtype, shape))


# -- which call of its module an observed value belongs to -----------------------------------


def _without_recomputed(
    observed: Iterable[tuple[MarkedValue, T]],
) -> Iterator[tuple[MarkedValue, T]]:
    """Leave out the activations that a backward pass recomputes (`jax.checkpoint`).

    A value is recomputed if a backward pass has begun and the gradient of an earlier call is
    still to come.
    """
    backward = False
    open_calls: dict[int, int] = {}
    for value, vector in observed:
        uid = value.mark.uid
        if value.mark.kind is Kind.GRADIENT:
            backward = True
            open_calls[uid] = open_calls.get(uid, 0) - 1
        elif backward and open_calls.get(uid, 0) > 0:
            continue
        elif value.mark.kind is Kind.ACTIVATION:
            open_calls[uid] = open_calls.get(uid, 0) + 1
        yield value, vector


def _in_program_order(observed: Iterable[tuple[MarkedValue, T]]) -> list[tuple[MarkedValue, T]]:
    """Sort what compiled code has called back with, because XLA calls in any order.

    The n-th callback of a mark belongs to the n-th run of its code. If all activations came
    before the gradients, the backward pass ran as its own function, from the last call to the
    first.
    """
    listed = list(observed)
    places: dict[tuple[int, Kind], list[int]] = {}
    for index, (value, _) in enumerate(listed):
        places.setdefault((value.mark.uid, value.mark.kind), []).append(index)
    keys: dict[int, tuple[int, int, bool]] = {}
    for (uid, kind), indices in places.items():
        activations = places.get((uid, Kind.ACTIVATION), [])
        is_gradient = kind is Kind.GRADIENT
        backwards = is_gradient and bool(activations) and max(activations) < indices[0]
        for run, index in enumerate(reversed(indices) if backwards else indices):
            keys[index] = run, uid, is_gradient
    return [listed[index] for index in sorted(keys, key=keys.__getitem__)]


def _first_calls(values: Iterable[MarkedValue]) -> list[int]:
    """Return the index of the first call of each value among those of its name.

    Activations count in program order. A gradient gets the index of its activation; a backward
    pass meets the calls from the last to the first.
    """
    listed = list(values)
    first: dict[int, int] = {}
    counts: dict[str, int] = {}
    open_calls: dict[int, list[int]] = {}  # calls whose gradients are still to come

    def number(index: int) -> None:
        mark = listed[index].mark
        first[index] = counts.get(mark.name, 0)
        counts[mark.name] = first[index] + listed[index].calls

    alone = []  # gradients without an activation
    for index, value in enumerate(listed):
        uid = value.mark.uid
        if value.mark.kind is Kind.ACTIVATION:
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
