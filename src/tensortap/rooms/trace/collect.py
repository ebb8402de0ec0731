"""Values that a tracer keeps: pending until they are gathered, then results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from tensortap import values as arrays
from tensortap.capture.pipeline import pipeline
from tensortap.capture.selection import CallCounters
from tensortap.core import ranks
from tensortap.core.arguments import check_callable, check_choice, check_count
from tensortap.core.errors import CaptureError
from tensortap.core.record import Kind, Opaque, Record, TensorData, Value
from tensortap.live.connections import connections
from tensortap.rooms.trace.gather import Gatherer
from tensortap.rooms.trace.results import (
    Iteration,
    PendingValues,
    TracedValues,
    TraceResults,
    copied,
    expanded,
    fingerprint,
    keyed_copy,
)
from tensortap.runs import init as run
from tensortap.values.adapters import adapter_of, safe_repr
from tensortap.values.protocol import type_name

Callback = Callable[..., Any]
_Parts = Mapping[str, TracedValues[Any]]


class TraceOptions(NamedTuple):
    """The options of `trace`."""

    every: int = 1
    gathering_interval: int | None = None
    changed: bool = True
    mode: str = "both"
    pre_save_callbacks: Iterable[Callback] = ()
    pre_gather_callbacks: Iterable[Callback] = ()
    post_gather_callbacks: Iterable[Callback] = ()
    post_trace_callbacks: Iterable[Callback] = ()
    group: Any = None
    results: bool = True

    def checked(self) -> TraceOptions:
        """Return the options with callbacks as tuples; raise if one makes no sense."""
        check_count("every", self.every)
        if self.gathering_interval is not None:
            check_count("gathering_interval", self.gathering_interval)
        check_choice("mode", self.mode, ("train", "eval", "both"))
        callbacks: dict[str, Any] = {}
        for stage in STAGES:
            given = getattr(self, stage)
            if not isinstance(given, Iterable):
                check_callable(stage, given)
            callbacks[stage] = (given,) if callable(given) else tuple(given)
            for one in callbacks[stage]:
                check_callable(stage, one)
        return self._replace(**callbacks)


STAGES = tuple(one for one in TraceOptions._fields if one.endswith("_callbacks"))


class ValueCollector:
    """Keeps values, gathers them, calls the callbacks; one for each tracer."""

    def __init__(self, options: TraceOptions) -> None:
        self.active = False
        self.gathered_paths: set[str] = set()  # paths that any rank has kept a value of
        self._options = options
        self._earlier = TraceResults()  # of earlier times that the tracer was entered
        self._gathered = TraceResults()
        self._pending: dict[str, PendingValues] = {}
        self._fingerprints: dict[str, Hashable] = {}  # of the value that was kept last
        self._gatherer: Gatherer | None = None
        self._rank: int | None = None
        self._errors: list[Exception] = []
        self._lock = threading.RLock()
        self._forked = False

    def after_fork(self) -> None:
        """Renew the lock; a forked child keeps nothing in memory, where it would be lost."""
        self._lock = threading.RLock()
        self._forked = True

    def begin(self, paths: Iterable[str]) -> None:
        """Collect values; each of the paths has an entry even if it gets none."""
        self.active, self._forked, self._rank = True, False, None
        for path in paths:
            self._gathered.setdefault(path, TracedValues())
        if self._options.gathering_interval is not None:
            self._gatherer = Gatherer(self._options.group, self._report)
            self._gatherer.connect()

    def keep(self, path: str, name: str, value: Any, iteration: Iteration, order: int) -> bool:
        """Keep a copy of a value unless it equals the last one; return False if discarded."""
        options = self._options
        with self._lock:
            pre_save = options.pre_save_callbacks
            both = None if pre_save else keyed_copy(value)
            mark: Hashable = None
            if both is not None:
                mark, value = both
            elif options.changed:
                mark = fingerprint(value)
            if options.changed and mark is not None and self._fingerprints.get(path) == mark:
                return True
            if both is None:
                value = copied(value)
            if pre_save:
                value = self._before_saving(pre_save, path, value)
                if value is None:
                    return False
            if options.changed:
                self._fingerprints[path] = mark
            if connections.connect():
                try:
                    _put_local(name, expanded(value), iteration, order)
                except Exception as error:  # the results keep the value anyway
                    pipeline.fault(path, error, "was not handed on")
            if options.results and not self._forked:
                if self._rank is None:
                    self._rank = ranks.rank_and_world_size()[0]
                pending = self._pending.get(path)
                if pending is None:
                    pending = self._pending[path] = PendingValues()
                pending.values.append(value)
                pending.iterations.append(iteration.number)
                pending.ranks.append(self._rank)
                pending.calls.append(iteration.call)
            return True

    def _before_saving(self, callbacks: Iterable[Callback], path: str, value: Any) -> Any:
        for callback in callbacks:
            try:
                value = callback(path, value)
            except Exception as error:
                self._report(f"{_name(callback)}({path})", error)
                self.raise_errors()
                continue
            if value is None:
                return None
        return value

    def gather_before(self, boundary: int | None) -> None:
        """Gather what was kept before that call of the model; nothing if there is no boundary."""
        if boundary is not None and not self._forked:
            self._gather(boundary)
            self.raise_errors()

    def _gather(self, boundary: int | None, together: bool = True) -> None:
        with self._lock:
            parts = {path: pending.take_before(boundary) for path, pending in self._pending.items()}
            self._rank = None
            self._call_all("pre_gather_callbacks", parts)
            gathered: _Parts | None = parts
            if together and self._gatherer is not None:
                try:
                    gathered = self._gatherer.gather(parts, last=boundary is None)
                except Exception as error:
                    self._report("gathering", error)
            if gathered is not None:
                self.gathered_paths |= {path for path, part in gathered.items() if part.values}
                self._call_all("post_gather_callbacks", gathered)
                _extend(self._gathered, gathered)

    def finish(self, raised: bool) -> None:
        """Gather the rest and call the last callbacks; after an error wait for no other rank."""
        options = self._options
        self._gather(None, together=not raised)
        self.disconnect()
        self._call_all("post_trace_callbacks", self._gathered)
        callbacks = [one for stage in STAGES for one in getattr(options, stage)]
        for callback in {id(one): one for one in callbacks}.values():
            close = getattr(callback, "close", None)
            if callable(close):
                try:
                    close()
                except Exception as error:
                    self._report(f"{_name(callback)}.close()", error)
        _extend(self._earlier, self._gathered)
        self._gathered = TraceResults()

    def disconnect(self) -> None:
        """Close the connections, which tells ranks that wait for this one."""
        if self._gatherer is not None:
            self._gatherer.close()
            self._gatherer = None

    @property
    def results(self) -> TraceResults:
        """Values gathered so far; without an interval, pending ones as well."""
        if not self.active and not self._gathered:
            return self._earlier
        merged = TraceResults()
        _extend(merged, self._earlier)
        _extend(merged, self._gathered)
        if self._options.gathering_interval is None:
            with self._lock:
                _extend(merged, {path: one.expanded() for path, one in self._pending.items()})
        return merged

    def _call_all(self, stage: str, parts: _Parts) -> None:
        for path, part in parts.items():
            for callback in getattr(self._options, stage):
                if not part.values:
                    break
                try:
                    callback(path, part.values, part.iterations, part.ranks)
                    part.check_lengths()
                except Exception as error:
                    self._report(f"{_name(callback)}({path})", error)

    def _report(self, name: str, error: Exception) -> None:
        """Count and log an error; in strict mode raise it once all ranks have gathered."""
        if pipeline.strict:
            self._errors.append(error)
        else:
            pipeline.fault(name, error, "failed")

    def raise_errors(self) -> None:
        """Raise the first error that was reported in strict mode."""
        if self._errors:
            errors, self._errors = self._errors, []
            raise errors[0]


def _extend(results: TraceResults, more: _Parts) -> None:
    for path, part in list(more.items()):
        results.setdefault(path, TracedValues()).extend(part)


def _name(callback: Callback) -> str:
    return getattr(callback, "__name__", None) or type(callback).__name__


# -- records ------------------------------------------------------------------------------

_counters = CallCounters()  # of the records of each name
_run: Any = None  # the run in which they are counted


def _put_local(name: str, value: Any, iteration: Iteration, order: int) -> None:
    """Make a record of a traced value and queue it."""
    global _run
    start = time.perf_counter_ns()
    step = iteration.call if pipeline.clock.step is None else pipeline.clock.step
    opened = run.opened()
    if _run is not opened:
        _run = opened
        _counters.clear()
    _, call = _counters.of(name).count(step)
    kind, dtype, shape = arrays.describe(value)
    adapter, shard = adapter_of(type(value)), None
    if adapter.local_shard is not None:
        value, shard = adapter.local_shard(value)
    snapshot, nbytes = _snapshot(value)
    if isinstance(snapshot, TensorData):
        dtype, shape = snapshot.dtype, snapshot.shape
    tags = {"mode": iteration.mode, "iteration": str(iteration.number), "binding": str(order)}
    if isinstance(value, Opaque):  # it could not be copied
        kind = value.type
    rank, world_size = ranks.rank_and_world_size()
    record = Record(
        name, Kind.LOCAL, step, call, pipeline.next_seq(), rank, world_size, time.time_ns(),
        kind, dtype, shape, shard, None, snapshot, None, tags,
    )  # fmt: skip
    pipeline.put_captured(record, nbytes, start)


def _snapshot(value: Any) -> tuple[Value, int]:
    """Return a snapshot, or type and repr of a value that no record can hold."""
    if isinstance(value, Opaque):
        return value, 0
    try:
        return arrays.snapshot(value, pipeline.pool)
    except CaptureError:  # sparse, quantized, a container that contains itself
        return Opaque(type_name(type(value)), safe_repr(value)), 0
