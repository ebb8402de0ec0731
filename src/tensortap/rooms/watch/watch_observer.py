"""Observations of a watcher: rate-limited, transformed, copied and queued for its worker."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from tensortap import values as arrays
from tensortap.capture.ledger import DISCONNECTED
from tensortap.capture.pipeline import pipeline
from tensortap.capture.queue import Queue, write_to
from tensortap.capture.selection import CallCounters
from tensortap.core import ranks
from tensortap.core.arguments import check_callable, check_choice
from tensortap.core.errors import CaptureError
from tensortap.core.record import Kind, Record, Summary
from tensortap.rooms.track.observing import Explain, Observed
from tensortap.rooms.track.options import NamePattern, Patterns
from tensortap.values.registry import parts

Transform = Callable[[Any], Any]
ROOM = "tensortap.rooms.watch"
_now = time.perf_counter_ns
_OUTPUTS = (Kind.ACTIVATION, Kind.WEIGHT)
_GRADIENTS = (Kind.GRADIENT, Kind.WEIGHT_GRADIENT)
_KINDS = {"outputs": _OUTPUTS, "gradients": _GRADIENTS, "both": (*_OUTPUTS, *_GRADIENTS)}


class Probe(NamedTuple):
    """A name that can be watched, or the reason why it cannot.

    `output` and `gradient` say whether hooks saw them. `in_place` says that a later operation
    overwrites the output: a hook sees it before, code after the model does not.
    """

    name: str
    type: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    output: bool = False
    gradient: bool = False
    in_place: bool = False
    note: str = ""


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


class RateLimit:
    """At most so many per second of each key; None is no limit.

    >>> limit = RateLimit(0.001)
    >>> limit.due("fc"), limit.due("fc"), limit.due("conv")
    (True, False, True)
    """

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


@dataclasses.dataclass
class Switches:
    """State that all targets of a watcher share."""

    active: bool = True  # until it is closed
    enabled: bool = True
    message: str = ""


class RateLimitedObserver:
    """Queues what hooks observe, and what is caught by hand, for the worker of a watcher."""

    queue_of: Callable[[], Queue | None]  # to the worker; the watcher sets it

    def __init__(
        self,
        name: str,
        selection: WatchSelection,
        *,
        every: int,
        rate: float | None,
        ranks: Collection[int] | None,
    ) -> None:
        self._name = name
        self.only_training = self.explains = self.inputs = False
        self.batch = None
        self.fault = pipeline.fault
        self._select(selection)
        self.switches = Switches()
        self.unseen: dict[str, str] = {}
        self._every = every
        self._limit = RateLimit(rate)
        self._ranks = ranks
        self._counters = CallCounters()

    def _select(self, selection: WatchSelection) -> None:
        self._selection = selection
        self._transform = selection.transform
        kinds = frozenset(_KINDS[selection.kind])
        patterns = Patterns(selection.include, selection.exclude, kinds)
        self.kinds = patterns.kinds
        self.wants = patterns.wants

    def with_options(self, **options: Any) -> RateLimitedObserver:
        """Return a copy with other options, for some targets; the rest is shared."""
        other = copy.copy(self)
        other._select(self._selection.updated(**options))
        return other

    @property
    def active(self) -> bool:
        return self.switches.active

    @property
    def capturing(self) -> bool:
        return self.switches.active and self.switches.enabled and pipeline.enabled

    @property
    def here(self) -> bool:
        return self._ranks is None or ranks.rank_and_world_size()[0] in self._ranks

    @property
    def step_number(self) -> int:
        return pipeline.clock.step or 0

    def due(self, name: str, kind: Kind) -> bool:
        """Return whether `every`, the rate and the rank allow a record of the call now."""
        if self._every > 1 and (self._counters.of(name).calls - 1) % self._every:
            return False
        return self._limit.due((name, kind)) and self.here

    def place(self, name: str, again: bool = False) -> tuple[int, int]:
        """Count a call of a name; return its step and call. `again`: those of the last call."""
        counter = self._counters.of(name)
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
        if not self.capturing:
            return None
        start = _now()
        self._capture(observed, value, self.step_number if step is None else step)
        pipeline.ledger.track(_now() - start)
        return None

    def _capture(self, observed: Observed, value: Any, step: int) -> None:
        tags = {**observed.tags, "device": str(getattr(value, "device", "cpu"))}
        if self.switches.message:
            tags["message"] = self.switches.message
        if self._transform is not None:
            value = self._transformed(observed.name, value)
            if value is None:
                return
            kind, dtype, shape = arrays.describe(value)
            observed = observed._replace(
                type=observed.type or kind, dtype=dtype, shape=shape, shard=None
            )
        nbytes = arrays.nbytes_of(value)
        rank, world_size = ranks.rank_and_world_size()
        queue = self.queue_of()
        if queue is None:
            return
        if not queue.accepting:
            queue.ledger.drop_values(DISCONNECTED)
            return
        if not queue.admit(nbytes, observed.name, observed.kind, step, rank):
            return
        snapshot, nbytes = arrays.snapshot(value, pipeline.pool)
        record = Record(
            observed.name, observed.kind, step, observed.call, pipeline.next_seq(), rank,
            world_size, time.time_ns(), observed.type, observed.dtype, observed.shape,
            observed.shard, None, snapshot, None, tags,
        )  # fmt: skip
        write_to([queue], record, nbytes, captured=False)

    def _transformed(self, name: str, value: Any) -> Any:
        """Return the result of the user's transform, which runs on the device without a graph."""
        assert self._transform is not None
        found = list(parts(ROOM))
        before = [part.version_of(value) for part in found]
        try:
            with contextlib.ExitStack() as stack:
                for part in found:
                    stack.enter_context(part.without_graph())
                result = self._transform(value)
        except Exception as error:
            reason = f"transform raised for {name!r}: {type(error).__name__}: {error}"
            pipeline.fault(f"transform of {self._name}", CaptureError(reason))
            return None
        if [part.version_of(value) for part in found] != before:
            pipeline.fault(f"in-place transform of {self._name}", CaptureError(
                f"transform changed {name!r} in place, which changes the training; "
                "return a new tensor instead"
            ))  # fmt: skip
        return result
