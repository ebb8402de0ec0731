"""Calling a JAX function and observing the outputs and gradients of its modules.

A jitted function is compiled a second time with statistics as additional outputs
(`instrumented_jit`), and its results stay bit-identical. A function that is not jitted runs
operation by operation. What JAX compiles inside it (jits, scans, loops, branches) is not observed:
`unseen` says so.
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
from tensortap.rooms.track.packed import PendingSummary, layout
from tensortap.values.jax.adapter import Deferred

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
        try:
            results, packed = instrumented(*args, **kwargs)
        except Exception as error:
            arrays = jax.tree.leaves((args, kwargs))
            if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
                raise  # it failed after it had taken the arrays: they cannot be used again
            failure = error
        else:
            outputs.append(packed)
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
        with self._marking():
            return fn(*args, **kwargs)

    def _observations(self, outputs: list[PackedOutputs]) -> list[Observation]:
        observed: list[tuple[MarkedValue, Deferred, int]] = []
        for packed in outputs:
            vector, start = Deferred(packed.vector, packed.vector.nbytes), 0
            for value in packed.info.values:
                observed.append((value, vector, start))
                start += value.words
        for value, words in _without_recomputed(self._collector.taken()):
            observed.append((value, Deferred(words, words.nbytes), 0))
        observations: list[Observation] = []
        first = _first_calls(value for value, _, _ in observed)
        for (value, vector, start), call in zip(observed, first, strict=True):
            observations += _calls_of(value, vector, start, call)
        return observations


def _calls_of(value: MarkedValue, vector: Deferred, start: int, call: int) -> Iterator[Observation]:
    """Yield the calls of a value, from this one on."""
    mark, dtype, shape = value.mark, value.dtype, value.shape
    for i in range(value.calls):
        seen = Observed(mark.name, mark.kind, call + i, mark.type, dtype, shape)
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
