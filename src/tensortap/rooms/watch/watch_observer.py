"""Observations of a watcher: rate-limited, transformed, copied and queued for its worker."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap import values as arrays
from tensortap.capture.ledger import DISCONNECTED
from tensortap.capture.pipeline import pipeline
from tensortap.capture.queue import write_to
from tensortap.core import ranks
from tensortap.core.arguments import check_callable, check_choice
from tensortap.core.errors import CaptureError
from tensortap.core.record import Kind, Record, Summary
from tensortap.rooms.track.observing import Explain, Observed
from tensortap.rooms.track.options import NamePattern, Patterns
from tensortap.values.registry import parts

if TYPE_CHECKING:
    from tensortap.rooms.watch.watcher import Watcher

Transform = Callable[[Any], Any]
ROOM = "tensortap.rooms.watch"
_now = time.perf_counter_ns
_OUTPUTS = (Kind.ACTIVATION, Kind.WEIGHT)
_GRADIENTS = (Kind.GRADIENT, Kind.WEIGHT_GRADIENT)
_KINDS = {"outputs": _OUTPUTS, "gradients": _GRADIENTS, "both": (*_OUTPUTS, *_GRADIENTS)}


class RateLimit:
    """At most so many per second of each key; None is no limit."""

    def __init__(self, rate: float | None) -> None:
        self._pause = 0 if rate is None or math.isinf(rate) else round(1e9 / rate)
        self._next: dict[object, int] = {}
        self._lock = threading.Lock()

    def due(self, key: object) -> bool:
        """Return whether the limit allows one now; if so, the next has to wait."""
        if not self._pause:
            return True
        now = time.monotonic_ns()
        if now < self._next.get(key, 0):
            return False
        with self._lock:
            planned = self._next.get(key, 0)
            if now < planned:
                return False
            # counted from the planned time, or steps that fall in between would lower the rate
            self._next[key] = max(planned + self._pause, now + self._pause // 2)
        return True


class WatchSelection(NamedTuple):
    """Options of the hooks of one target: what they capture, and how they transform it."""

    kind: str = "outputs"
    include: NamePattern = None
    exclude: NamePattern = None
    transform: Transform | None = None

    def updated(self, **options: Any) -> WatchSelection:
        """Return the selection with the options that are not None; raise if one is invalid."""
        given = {option: value for option, value in options.items() if value is not None}
        selection = self._replace(**given)
        check_choice("kind", selection.kind, tuple(_KINDS))
        if selection.transform is not None:
            check_callable("transform", selection.transform)
        return selection


class TargetObserver:
    """Queues what the hooks of some targets observe for the worker of their watcher."""

    only_training = explains = inputs = False
    batch = None

    def __init__(self, watcher: Watcher, selection: WatchSelection) -> None:
        self._watcher = watcher
        self.selection = selection
        self.unseen = watcher.unseen
        self.fault = pipeline.fault
        patterns = Patterns(selection.include, selection.exclude, frozenset(_KINDS[selection.kind]))
        self.kinds = patterns.kinds
        self.wants = self.could_want = patterns.wants

    @property
    def active(self) -> bool:
        return self._watcher.active

    @property
    def capturing(self) -> bool:
        return self._watcher.active and self._watcher.enabled and pipeline.enabled

    @property
    def step_number(self) -> int:
        return pipeline.clock.step or 0

    def due(self, name: str, kind: Kind) -> bool:
        """Return whether `every`, the rate and the rank allow a record of the call now."""
        watcher = self._watcher
        if watcher.every > 1 and (watcher.counters.of(name).calls - 1) % watcher.every:
            return False
        return watcher.limit.due((name, kind)) and watcher.here

    def place(self, name: str, again: bool = False) -> tuple[int, int]:
        """Count a call of a name; return its step and call. `again`: those of the last call."""
        counter = self._watcher.counters.of(name)
        if again:
            return counter.position(max(0, counter.calls - 1))
        return counter.count(pipeline.clock.step)

    def observe(
        self,
        observed: Observed,
        value: Any,
        step: int | None = None,
        stats: Summary | None = None,
        explain: Explain | None = None,
    ) -> Summary | None:
        if self.capturing:
            start = _now()
            self._capture(observed, value, self.step_number if step is None else step)
            pipeline.ledger.track(_now() - start)
        return None

    def _capture(self, observed: Observed, value: Any, step: int) -> None:
        tags = {**observed.tags, "device": str(getattr(value, "device", "cpu"))}
        if self._watcher.message:
            tags["message"] = str(self._watcher.message)
        if self.selection.transform is not None:
            value = self._transformed(self.selection.transform, observed.name, value)
            if value is None:
                return
            kind, dtype, shape = arrays.describe(value)
            observed = observed._replace(
                type=observed.type or kind, dtype=dtype, shape=shape, shard=None
            )
        rank, world_size = ranks.rank_and_world_size()
        queue = self._watcher.queue()
        if queue is None:
            self._watcher.dropped += 1
            return
        if not queue.accepting:
            queue.ledger.drop_values(DISCONNECTED)
            return
        nbytes = arrays.nbytes_of(value)
        if not queue.admit(nbytes, observed.name, observed.kind, step, rank):
            return
        snapshot, nbytes = arrays.snapshot(value, pipeline.pool)
        record = Record(
            observed.name, observed.kind, step, observed.call, pipeline.next_seq(), rank,
            world_size, time.time_ns(), observed.type, observed.dtype, observed.shape,
            observed.shard, None, snapshot, None, tags,
        )  # fmt: skip
        write_to([queue], record, nbytes, captured=False)

    def _transformed(self, transform: Transform, name: str, value: Any) -> Any:
        """Return the result of the user's transform, which runs on the device without a graph."""
        found = list(parts(ROOM))
        before = [part.version_of(value) for part in found]
        try:
            with contextlib.ExitStack() as stack:
                for part in found:
                    stack.enter_context(part.without_graph())
                result = transform(value)
        except Exception as error:
            reason = f"transform raised for {name!r}: {type(error).__name__}: {error}"
            pipeline.fault(f"transform of {self._watcher.name}", CaptureError(reason))
            return None
        if [part.version_of(value) for part in found] != before:
            pipeline.fault(f"in-place transform of {self._watcher.name}", CaptureError(
                f"transform changed {name!r} in place, which changes the training; "
                "return a new tensor instead"
            ))  # fmt: skip
        return result
