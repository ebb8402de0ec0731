"""Traced functions: their calls and iterations, what they bind, why a path got no value."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

from tensortap.capture.pipeline import pipeline
from tensortap.rooms.trace.collect import ValueCollector
from tensortap.rooms.trace.paths import ANY, follow, join, nearest, parts
from tensortap.rooms.trace.resolve import LocalProbe, TracedFunction
from tensortap.rooms.trace.results import Iteration
from tensortap.rooms.trace.rewrite import ProbeSpec

log = logging.getLogger("tensortap")

IN_GRAPH = "runs inside a graph of torch.compile, where nothing is traced: trace the eager model"

Calls: TypeAlias = "collections.Counter[str]"  # of the model, or of one function, by mode


def _count(calls: Calls, training: bool) -> Iteration:
    mode = "train" if training else "eval"
    calls[mode] += 1
    return Iteration(calls[mode] - 1, calls.total() - 1, mode)


class IterationCounter:
    """Counts iterations, selects those to trace, and knows when to gather.

    A function that is called outside of the model's forward, or whose target is not a model,
    counts its own calls.
    """

    def __init__(self, every: int, mode: str, interval: int | None) -> None:
        self._every = every
        self._mode = mode
        self._interval = interval
        self._calls: Calls = collections.Counter()
        self._depth = 0
        self.current: Iteration | None = None  # of the model
        self.selected = False  # whether the current iteration of the model is traced
        self.model: Any = None
        self.in_backward: Callable[[], bool] | None = None

    def begin(self, training: bool) -> int | None:
        """Count a call of the model; return the boundary if values before it are to be gathered."""
        self._depth += 1
        self.current = _count(self._calls, training)
        self.selected = self.selects(self.current)
        return self._boundary(self.current)

    def end(self) -> None:
        self._depth -= 1

    def count_own(self, calls: Calls) -> tuple[Iteration, int | None]:
        """Count a call of a function that counts its own; return its iteration and boundary."""
        iteration = _count(calls, self.model is None or self.model.training)
        # if the model is called at all, its calls decide when to gather
        return iteration, self._boundary(iteration) if self.current is None else None

    def _boundary(self, iteration: Iteration) -> int | None:
        if self._interval is None or self._mode not in ("both", iteration.mode):
            return None
        done = iteration.call if self._mode == "both" else iteration.number
        return iteration.call if done and done % self._interval == 0 else None

    def of_model(self, only_inside: bool) -> Iteration | None:
        """Return the current iteration of the model; with `only_inside`, only during its call."""
        return None if only_inside and not self._depth else self.current

    def selects(self, iteration: Iteration) -> bool:
        return iteration.number % self._every == 0 and self._mode in ("both", iteration.mode)


class FunctionListener:
    """Listens to the calls of one function, for one tracer."""

    def __init__(
        self,
        traced: TracedFunction,
        probes: list[LocalProbe],
        collector: ValueCollector,
        counter: IterationCounter,
    ) -> None:
        self.traced = traced
        self.probes = probes
        self.collector = collector
        self.counts_model = False  # it is the forward whose calls are the iterations
        self.outside_forward = False  # a method of the model that may run outside its forward
        self._compiled = False
        self._counter = counter
        self._calls: Calls = collections.Counter()
        self._called = 0
        self._skipped = 0  # calls that `tap.enable`, `every` or `mode` leave out
        self._last_forward = -1  # the last call of the model in whose forward pass it ran
        # records of a plain function have its name in front
        self.prefix = "" if traced.path else f"{traced.function.__name__}."
        self.by_name: dict[str | None, list[LocalProbe]] = {}
        for probe in probes:
            self.by_name.setdefault(probe.name, []).append(probe)

    def spec(self) -> ProbeSpec:
        """Return what the function has to report."""
        names = frozenset(name for name in self.by_name if name is not None)
        return ProbeSpec(names, None in self.by_name)

    def call(self) -> TracedCall | None:
        """Begin a call; return None if it is not traced."""
        if not self.collector.active:
            return None
        if not pipeline.enabled:
            self._skipped += 1
            return None
        counter = self._counter
        if self.counts_model:
            self.collector.gather_before(counter.begin(counter.model.training))
        iteration = counter.current
        if iteration is None or self.outside_forward:
            iteration = self._iteration()
        selected = counter.selected if iteration is counter.current else counter.selects(iteration)
        if not selected:
            self._skipped += 1
            return None
        if counter.in_backward is not None:
            if not counter.in_backward():
                self._last_forward = iteration.call
            elif self._last_forward == iteration.call:
                return None  # activation checkpointing recomputes what the forward pass showed
        self._called += 1
        return TracedCall(self, iteration)

    def _iteration(self) -> Iteration:
        iteration = self._counter.of_model(only_inside=self.outside_forward)
        if iteration is None:
            iteration, boundary = self._counter.count_own(self._calls)
            self.collector.gather_before(boundary)
        return iteration

    def fault(self, error: Exception) -> None:
        pipeline.fault(self.traced.label, error, "was not traced")

    def compiled(self) -> None:
        """Report that torch.compile has compiled the function into a graph."""
        if not self._compiled:
            self._compiled = True
            log.warning("tensortap: %s %s", self.traced.label, IN_GRAPH)

    def empty_probes(self) -> list[tuple[LocalProbe, str]]:
        """Return the probes without any value, each with the reason."""
        return [(probe, self._why_empty(probe)) for probe in self.probes if not probe.kept]

    def _why_empty(self, probe: LocalProbe) -> str:
        label, inside = self.traced.label, probe.inside
        if not self._called:
            if self._compiled:
                return f"{label} {IN_GRAPH}"
            if self._skipped:
                reasons = "capturing was off, or every= and mode= selected no values"
                return f"{label} was called {self._skipped} times, but {reasons}"
            where = "in this process, outside of compiled graphs"
            return f"{label} was never called while it was traced ({where})"
        if not probe.bound:
            name = probe.name
            verb = "returned" if name is None else f"bound {name!r}"
            return f"{label} was called {self._called} times and never {verb}"
        if inside and not probe.parts:
            return f"the value of {probe.label} has no parts"
        if inside:
            return f"no {inside[0]!r} in {probe.label}; {nearest(inside[0], probe.parts)}"
        if probe.error is not None:
            return f"{type(probe.error).__name__}: {probe.error}"
        return "a callback discarded it each time"


class TracedCall:
    """One call of a traced function."""

    __slots__ = ("_listener", "_orders", "iteration")

    def __init__(self, listener: FunctionListener, iteration: Iteration) -> None:
        self.iteration = iteration
        self._listener = listener
        self._orders: dict[str, int] = {}

    def bind(self, name: str | None, value: Any, part: str | None) -> None:
        """Take a binding of a name, or of a `part` of its value."""
        probes = self._listener.by_name.get(name, ())
        # where several probes match, each path is kept once per binding
        kept: set[str] | None = set() if len(probes) > 1 else None
        for probe in probes:
            inside = probe.inside
            if part is None or (inside and (part == ANY or inside[0] in (ANY, part))):
                self._take(probe, value, kept)

    def result(self, value: Any) -> None:
        self.bind(None, value, None)

    def _take(self, probe: LocalProbe, value: Any, kept: set[str] | None) -> None:
        probe.bound += 1
        if not probe.inside:
            self._keep(probe, "", value, kept)
            return
        exists = False
        for path, part in follow(value, probe.inside):
            exists = True
            self._keep(probe, "." + join(path) if path else "", part, kept)
        if not exists and not probe.kept:
            probe.parts = tuple([name for name, _ in parts(value)]) or probe.parts

    def _keep(self, probe: LocalProbe, suffix: str, value: Any, kept: set[str] | None) -> None:
        path = probe.label + suffix
        if kept is not None:
            if path in kept:
                probe.kept += 1
                return
            kept.add(path)
        order = self._orders.get(path, 0)
        self._orders[path] = order + 1
        name = self._listener.prefix + path
        try:
            if self._listener.collector.keep(path, name, value, self.iteration, order):
                probe.kept += 1
        except Exception as error:
            probe.error = error
            pipeline.fault(path, error, "was not traced")

    def fault(self, error: Exception) -> None:
        self._listener.fault(error)
