"""`trace`: any local variable of any method or function, gathered over ranks on request."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

from tensortap.capture.pipeline import pipeline
from tensortap.core.errors import TensortapError
from tensortap.rooms.trace import instrument
from tensortap.rooms.trace.collect import Callback, TraceOptions, ValueCollector
from tensortap.rooms.trace.paths import ANY, follow, join, nearest, parse, parts
from tensortap.rooms.trace.resolve import LocalProbe, NoSource, Resolver, TracedFunction, items
from tensortap.rooms.trace.results import Iteration, TraceResults
from tensortap.rooms.trace.rewrite import ProbeSpec
from tensortap.values import registry

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


class Tracer:
    """Local variables that are being traced; made by `trace`, used in a ``with`` statement."""

    def __init__(self, target: Any, paths: Sequence[str], options: TraceOptions) -> None:
        self.target = target
        self.paths = tuple(paths)
        self.options = options
        self._segments = {path: parse(path) for path in self.paths}
        self._collector = ValueCollector(options)
        self._counter = IterationCounter(options.every, options.mode, options.gathering_interval)
        self._listeners: list[FunctionListener] = []
        self._patterns: dict[LocalProbe, str] = {}  # the path that each probe comes from
        self._reported: set[str] = set()
        self._hooks = contextlib.ExitStack()
        self.missing: dict[str, str] = {}  # paths that nothing stands for, and why

    def __enter__(self) -> Tracer:
        if self._collector.active:
            raise RuntimeError("this tracer is already entered: leave it first, or make another")
        target, resolver = _resolver(self.target)
        probes = self._resolve(resolver)
        paths = [probe.label for probe in self._patterns if not probe.inside]
        self._check_compiled(probes)
        _active.add(self._collector)
        try:
            self._collector.begin(paths)
            self._listen(probes)
            self._watch_root(target)
        except BaseException:
            self._stop()
            self._collector.disconnect()
            raise
        return self

    def _resolve(self, resolver: Resolver) -> dict[TracedFunction, list[LocalProbe]]:
        """Return the probes of each function that the paths stand for."""
        by_function: dict[TracedFunction, list[LocalProbe]] = {}
        known: set[tuple[TracedFunction, tuple[str, ...], tuple[str, ...]]] = set()
        self._patterns = {}
        for path, segments in self._segments.items():
            probes, reason = resolver.resolve(segments)
            if not probes:
                self.missing[path] = reason
                self._report(path, f"nothing is traced as {path!r}: {reason}")
            for probe in probes:
                key = (probe.traced, probe.path, probe.inside)
                if key not in known:  # else an earlier path stands for it as well
                    known.add(key)
                    self._patterns[probe] = path
                    by_function.setdefault(probe.traced, []).append(probe)
        return by_function

    def _check_compiled(self, probes: Iterable[TracedFunction]) -> None:
        """Raise if a module is compiled: nothing is traced inside graphs."""
        models = _model_tracing()
        compiled = () if models is None else models.compiled(self.target)
        for traced in probes:
            if id(traced.this) in compiled:
                raise TensortapError(f"cannot trace {traced.label!r}: its module {IN_GRAPH}")

    def _listen(self, probes: Mapping[TracedFunction, list[LocalProbe]]) -> None:
        for traced, own in probes.items():
            listener = FunctionListener(traced, own, self._collector, self._counter)
            try:
                instrument.listen(traced.function, traced.this, listener, listener.spec())
            except NoSource as error:
                self._report_no_source(listener, error)
            else:
                self._listeners.append(listener)
        instrument.clear_cache()

    def _report_no_source(self, listener: FunctionListener, error: NoSource) -> None:
        """Raise if a path names the function; log if it was found by a wildcard."""
        for probe in listener.probes:
            path = probe.label
            name = listener.traced.function.__qualname__
            message = f"cannot trace {path!r}: the source of {name} is needed, but {error}"
            pattern = self._segments[self._patterns[probe]]
            if ANY not in pattern:
                raise NoSource(message) from None
            self._report(path, message)

    def _watch_root(self, target: Any) -> None:
        models = _model_tracing()
        if models is None or not models.is_model(target) or models.closed(target) is not None:
            return  # it takes no hooks
        for one in self._listeners:
            mine = one.traced.this is target
            one.outside_forward = mine and one.traced.path not in ((), ("forward",))
        self._counter.model = target
        self._counter.in_backward = models.in_backward
        outside = any(one.outside_forward for one in self._listeners)
        forward = [one for one in self._listeners if one.traced.path == ("forward",)]
        if forward and not outside:
            forward[0].counts_model = True  # it is told of every call anyway
        else:
            end = self._counter.end if outside else None
            self._hooks.enter_context(models.hook_root(target, self._begin_iteration, end))

    def _begin_iteration(self, model: Any) -> None:
        if self._collector.active and pipeline.enabled:
            self._collector.gather_before(self._counter.begin(model.training))

    def __exit__(self, *error: object) -> None:
        raised = bool(error) and error[0] is not None
        self._stop()
        try:
            self._collector.finish(raised)
            self._report_empty_probes()
            self._collector.raise_errors()
        except Exception:
            if not raised:  # else the user's exception goes first
                raise
            log.exception("tensortap: error while ending a trace")
        finally:
            self._listeners = []

    def _stop(self) -> None:
        self._collector.active = False
        _active.discard(self._collector)
        for one in self._listeners:
            instrument.unlisten(one.traced.function, one)
        self._hooks.close()

    @property
    def results(self) -> TraceResults:
        """Path → `values`, `iterations` and `ranks`, aligned.

        While the tracer is entered: what has been gathered, or without an interval everything.
        """
        return self._collector.results

    def _report(self, path: str, message: str) -> None:
        """Log a message about a path once."""
        if path not in self._reported:
            self._reported.add(path)
            log.warning("tensortap: %s", message)

    def _report_empty_probes(self) -> None:
        """Log which paths got no value and why, once for all that one pattern stands for."""
        groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for listener in self._listeners:
            for probe, reason in listener.empty_probes():
                path = probe.label
                gathered = self._collector.gathered_paths
                if any(one == path or one.startswith(f"{path}.") for one in gathered):
                    continue  # another rank has a value
                pattern = self._patterns[probe]
                alike = reason.replace(listener.traced.label, "")
                whole_path = join((*probe.path, *probe.inside))
                groups.setdefault((pattern, alike), []).append((whole_path, reason))
        for (pattern, _), ((path, reason), *others) in groups.items():
            more = f" (the same for {len(others)} more paths of {pattern!r})" if others else ""
            self._report(path, f"no value was kept for {path!r}: {reason}{more}")


_active: weakref.WeakSet[ValueCollector] = weakref.WeakSet()


def _after_fork() -> None:
    for collector in list(_active):
        collector.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _model_tracing() -> ModuleType | None:
    """Return what is needed to trace models, of the framework that the user has imported."""
    return next(registry.parts("tensortap.rooms.trace"), None)


def _resolver(target: Any) -> tuple[Any, Resolver]:
    models = _model_tracing()
    if models is None:
        return target, Resolver(target, items)
    if not models.is_model(target):
        return target, Resolver(target, items, closed=models.closed)
    target = models.model_inside(target)
    children = functools.partial(models.children, others=items)
    return target, Resolver(target, children, models.is_common, models.closed)


def trace(
    model: Any,
    paths: str | Sequence[str],
    *,
    every: int = 1,
    gathering_interval: int | None = None,
    changed: bool = True,
    mode: str = "both",
    pre_save_callbacks: Iterable[Callback] = (),
    pre_gather_callbacks: Iterable[Callback] = (),
    post_gather_callbacks: Iterable[Callback] = (),
    post_trace_callbacks: Iterable[Callback] = (),
    group: Any = None,
    results: bool = True,
) -> Tracer:
    """Trace local variables: ``with tap.trace(model, ["blocks.*.forward.scores"]) as tracer: …``.

    `model` is a model, any object, or a function. A path consists of modules, a function, a
    name in it, and attributes, keys and indices of its value; a function or module alone stands
    for what it returns. ``*`` stands for one segment.

    `every` selects each n-th iteration (call of the model), `mode` "train", "eval" or "both".
    `changed` skips a value that equals the last one kept. Every `gathering_interval` iterations,
    the values of all ranks are gathered to rank 0 of `group`. `results=False` keeps no values in
    memory, only in the open run or the live session. Callbacks before a value is kept are called
    as ``f(name, value)`` and return what to keep, or None; callbacks before and after gathering and
    at the end are called as ``f(name, values, iterations, ranks)`` and change the lists.

    >>> def mean(xs):
    ...     total = sum(xs)
    ...     return total / len(xs)
    >>> with trace(mean, ["total", "return"]) as tracer:
    ...     _ = mean([1.0, 2.0])
    >>> tracer.results["total"].values, tracer.results["return"].values
    ([3.0], [1.5])
    """
    options = TraceOptions(
        every, gathering_interval, changed, mode, pre_save_callbacks, pre_gather_callbacks,
        post_gather_callbacks, post_trace_callbacks, group, results,
    ).checked()  # fmt: skip
    if not isinstance(paths, Iterable):
        raise TypeError(f"paths must be a path like 'forward.x' or several, got {paths!r:.80}")
    paths = [paths] if isinstance(paths, str) else list(paths)
    if not paths:
        raise ValueError("paths must not be empty: name what to trace, like 'blocks.*.forward.x'")
    return Tracer(model, paths, options)
