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
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from tensortap.frameworks.jax import marks
from tensortap.frameworks.jax.call_order import first_calls, in_program_order, without_recomputed
from tensortap.frameworks.jax.device_stats import can_reduce, pack
from tensortap.frameworks.jax.flax_modules import OnError, Wants, marked_modules
from tensortap.frameworks.jax.harvest import MarkedValue
from tensortap.frameworks.jax.instrumented_jit import (
    InstrumentedJit,
    PackedOutputs,
    is_jitted,
    jit_options,
)
from tensortap.frameworks.jax.marks import ValueMark
from tensortap.frameworks.jax.observation import DeviceVector, Observation
from tensortap.stats.packed import layout

NOT_JITTED = (
    "it is not jitted: the jits, scans, loops and branches in it are observed by callbacks, and "
    "their results may differ in the last bits; jit the whole function to keep them bit-identical"
)
_UNKNOWN_OPTIONS = "not observed: this version of JAX does not tell how it was jitted"

_Eager = list[tuple[MarkedValue, DeviceVector]]
_keys = itertools.count()


class Intercept:
    """Calls functions and returns the observations of what their modules compute.

    `wants` says for a kind and a name whether to observe it; it is asked when a function is
    traced. `on_error` gets the errors of observing. `unseen` maps names to what could not be
    observed, or not without side effects, and why.
    """

    def __init__(
        self, wants: Wants = lambda kind, name: True, on_error: OnError = lambda name, error: None
    ) -> None:
        self._wants = wants
        self._on_error = on_error
        self._key = f"tracker{next(_keys)}"
        self._instrumented: dict[int, InstrumentedJit] = {}  # by id; each keeps its function alive
        self._called_back: _Eager = []
        self._lock = threading.Lock()
        self.unseen: dict[str, str] = {}

    def _note(self, name: str, reason: str) -> None:
        known = self.unseen.get(name)
        if known is None or reason not in known:
            self.unseen[name] = reason if known is None else f"{known}; {reason}"

    @contextlib.contextmanager
    def _marking(self) -> Iterator[None]:
        """Mark what is traced here; the metadata keeps it separate in JAX's caches."""
        with set_xla_metadata(tensortap=self._key), marked_modules(self._wants, self._on_error):
            yield

    def __call__(self, fn: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Observation]]:
        """Return the results of ``fn(*args, **kwargs)``, and the observations."""
        while isinstance(fn, functools.partial):
            args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
        if isinstance(fn, types.MethodType) and is_jitted(fn.__func__):
            args, fn = (fn.__self__, *args), fn.__func__
        marks.set_callback_receiver(self._take_callback)
        outputs: list[PackedOutputs] = []
        eager: _Eager = []
        jitted = is_jitted(fn)
        if jitted:
            results = self._call_jitted(fn, outputs, *args, **kwargs)
        else:
            with self._replacing_jitted(fn, outputs) as replaced:
                # a wrapper of a jitted function computes nothing itself
                call = fn if replaced else functools.partial(self._call_eagerly, fn, eager)
                results = call(*args, **kwargs)
        if any(packed.info.calls_back for packed in outputs) or (
            not jitted and marks.may_call_back()
        ):
            jax.block_until_ready(results)
            jax.effects_barrier()
        return results, self._observations(outputs, eager)

    def _call_jitted(
        self, fn: Any, outputs: list[PackedOutputs], /, *args: Any, **kwargs: Any
    ) -> Any:
        instrumented = self._instrumented.get(id(fn))
        if instrumented is None:
            options = jit_options(fn)
            if options is None:
                self._note(getattr(fn, "__name__", "function"), _UNKNOWN_OPTIONS)
                return fn(*args, **kwargs)
            instrumented = InstrumentedJit(fn, options, self._marking, self._note)
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
        self._note(instrumented.name, f"not observed: {type(failure).__name__}: {failure}")
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

    def _call_eagerly(self, fn: Any, eager: _Eager, /, *args: Any, **kwargs: Any) -> Any:
        def receive(mark: ValueMark, x: Any) -> None:
            if can_reduce(x.dtype):
                value = MarkedValue(mark, x.dtype.name, tuple(x.shape))
                eager.append((value, DeviceVector(_pack(x))))
            else:
                self._note(mark.name, f"no statistics for dtype {x.dtype}")

        with self._marking(), marks.EagerMarks(receive) as eager_marks:
            results = fn(*args, **kwargs)
        if eager_marks.compiled:
            self._note(getattr(fn, "__name__", "function"), NOT_JITTED)
        return results

    def _take_callback(
        self, mark: ValueMark, dtype: str, shape: tuple[int, ...], words: Any
    ) -> None:
        with self._lock:
            vector = DeviceVector(np.asarray(words))
            self._called_back.append((MarkedValue(mark, dtype, shape), vector))

    def _observations(self, outputs: list[PackedOutputs], eager: _Eager) -> list[Observation]:
        with self._lock:
            called_back, self._called_back = self._called_back, []
        observed: list[tuple[MarkedValue, DeviceVector, int]] = []
        for packed in outputs:
            for name, reason in packed.info.unseen:
                self._note(name, reason)
            vector, start = DeviceVector(packed.vector), 0
            for value in packed.info.values:
                observed.append((value, vector, start))
                start += value.words
        in_order = in_program_order(without_recomputed(called_back))
        observed += [(*pair, 0) for pair in (*without_recomputed(eager), *in_order)]
        observations = []
        first = first_calls(value for value, _, _ in observed)
        for (value, vector, start), call in zip(observed, first, strict=True):
            words = layout(value.dtype).words
            mark = value.mark
            observations += [
                Observation(mark.kind, mark.name, mark.part, mark.type, value.dtype, value.shape,
                            call + i, vector, start + i * words)
                for i in range(value.calls)
            ]  # fmt: skip
        return observations


_pack: Callable[[Any], jax.Array] = jax.jit(pack)
