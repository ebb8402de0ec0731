"""Find where non-finite values arise in a JAX program: in a module, or between two modules.

While a program is traced, the inputs of modules are marked that are no module's output. Their
statistics are computed like those of outputs. They make no records: they only tell, for the first
output that is not finite, whether the input was so already.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tensortap.frameworks.jax.adapter import Deferred
from tensortap.frameworks.jax.device_stats import summary_at
from tensortap.frameworks.jax.marks import (
    Collector,
    MarkedValue,
    MarkOrigin,
    ValueMark,
    input_mark,
    mark,
)
from tensortap.frameworks.jax.runs import manual_axes
from tensortap.frameworks.observing import Explain
from tensortap.frameworks.origin import EnclosingCall, behind, caller_name, origin_tags
from tensortap.record import Kind, Summary
from tensortap.stats.packed import layout

# code of the libraries through which a call of a module goes
_PLUMBING = (
    "tensortap.", "jax.", "contextlib", "functools", "flax.linen.module", "flax.core.",
    "flax.linen.transforms", "equinox._",
)  # fmt: skip


class OpenCall(NamedTuple):
    """A call of a module that is under way."""

    name: str
    caller: str
    inputs: tuple[int, ...]
    returned: int  # number of modules that had returned before
    blind: bool  # whether there are inputs that cannot be marked


class MarkedCalls:
    """The calls of modules that are under way while a program is traced, and their inputs."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._known: dict[int, tuple[Any, ValueMark]] = {}  # marked values, by id
        self._open: list[OpenCall] = []
        self._last = ""
        self._returned = 0

    def begin(self, name: str, gradient: bool, inputs: Any) -> Any:
        """Enter a call of a module; return its inputs, marked unless modules made them."""
        found: dict[int, None] = {}
        blind = bool(manual_axes())  # devices deliver in no fixed order there

        def marked(x: Any) -> Any:
            nonlocal blind
            if not isinstance(x, jax.Array):  # another tree: its identity may matter
                blind |= any(map(_is_float, jax.tree_util.tree_leaves(x)))
                return x
            if blind or not _is_float(x):
                return x
            reference, label = self._known.get(id(x), (None, None))
            if label is None or reference is None or reference() is not x:
                label = input_mark(name, gradient, self._collector)
                x = mark(x, label)
                self.note(x, label)
            label.uses.names.append(name)
            if label.is_input:
                found[label.uid] = None
            return x

        inputs = jax.tree_util.tree_map(marked, inputs, is_leaf=_is_no_container)
        caller = _caller(sys._getframe(1))
        self._open.append(OpenCall(name, caller, tuple(found), self._returned, blind))
        return inputs

    def note(self, x: Any, label: ValueMark) -> None:
        """Note a marked value: it is not marked again as an input."""
        self._known[id(x)] = weakref.ref(x), label

    def end(self, forward: str) -> MarkOrigin | None:
        """Leave the innermost call, of the function `forward`; return what is known about it."""
        call = self._open.pop()
        after = f"{forward}, after {self._last}" if self._returned > call.returned else ""
        enclosing, caller = [], call.caller
        for outer in reversed(self._open):
            enclosing.append((outer.name, caller, outer.inputs))
            caller = outer.caller
        origin = MarkOrigin(call.inputs, self._last, after, tuple(enclosing))
        self._last = call.name
        self._returned += 1
        return None if any(each.blind for each in (call, *self._open)) else origin


def _is_float(x: Any) -> bool:
    return isinstance(x, jax.Array) and bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _is_no_container(node: Any) -> bool:
    return type(node) not in (tuple, list, dict)


def _caller(frame: FrameType | None) -> str:
    """Return the function and line that called a module, of the program or of a layer."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PLUMBING):
        frame = frame.f_back
    return "" if frame is None else caller_name(frame)


class InputEvidence:
    """The statistics of inputs after a call of a program, and what they tell about outputs."""

    def __init__(self) -> None:
        self._inputs: dict[tuple[int, Kind], list[tuple[MarkedValue, Deferred, int]]] = {}
        self._gradients: list[Callable[[], list[str]]] = []  # who took it, if it is not finite
        self._seen: dict[tuple[int, Kind], int] = {}

    def add(self, value: MarkedValue, vector: Deferred, start: int) -> None:
        """Add the statistics of an input, or of its gradient, in program order."""
        kind = value.mark.kind
        self._inputs.setdefault((value.mark.uid, kind), []).append((value, vector, start))
        if kind is Kind.GRADIENT:
            self._gradients.append(functools.partial(_bad_uses, value, vector, start))

    def explainers(self, value: MarkedValue) -> Iterator[Explain | None]:
        """Yield for every call of an output, or of its gradient, what finds its tags."""
        label = value.mark
        key = label.uid, label.kind
        occurrence = self._seen[key] = self._seen.get(key, -1) + 1
        gradients = self._gradients[:] if label.kind is Kind.GRADIENT else []
        for index in range(value.calls):
            if label.origin is None:
                yield None
            elif label.kind is Kind.GRADIENT:
                yield functools.partial(_behind, label.uses.names, gradients)
            else:
                worst = functools.partial(self._worst, value, occurrence, index)
                yield functools.partial(_origin, label.name, label.origin, worst)

    def _worst(self, value: MarkedValue, occurrence: int, index: int, uids: tuple[int, ...]) -> str:
        """Return what some inputs contained in the same iteration of all loops."""
        found = []
        for uid in uids:
            entries = self._inputs.get((uid, Kind.ACTIVATION), [])
            if entries:
                given, vector, start = entries[min(occurrence, len(entries) - 1)]
                at = index // math.prod(value.loops[len(given.loops) :])
                found.append(_stats(given, vector, start, min(at, given.calls - 1)))
        return _word(found)


def _origin(
    name: str,
    origin: MarkOrigin,
    worst: Callable[[tuple[int, ...]], str],
    stats: Summary,
) -> dict[str, str]:
    enclosing = [
        EnclosingCall(outer, caller, functools.partial(worst, inputs))
        for outer, caller, inputs in origin.enclosing
    ]
    return origin_tags(name, worst(origin.inputs), origin.after, origin.last, enclosing)


def _behind(
    uses: list[str], gradients: list[Callable[[], list[str]]], stats: Summary
) -> dict[str, str]:
    return behind(next(filter(None, (bad() for bad in gradients)), uses))


def _bad_uses(value: MarkedValue, vector: Deferred, start: int) -> list[str]:
    """Return who took an input if its gradient is not finite in any call."""
    stats = [_stats(value, vector, start, index) for index in range(value.calls)]
    return value.mark.uses.names if _word(stats) not in ("", "-Inf") else []


def _stats(value: MarkedValue, vector: Deferred, start: int, index: int) -> Summary | None:
    place = start + index * layout(value.dtype).words
    return summary_at(vector, place, value.dtype, value.shape).resolve()


def _word(stats: list[Summary | None]) -> str:
    """Return what tensors with these statistics contain."""
    known = [each for each in stats if each is not None]
    for word, counts in (
        ("NaN", [each.nans for each in known]),
        ("Inf", [each.posinfs for each in known]),
        ("-Inf", [each.neginfs for each in known]),
    ):
        if any(counts):
            return word
    return ""
