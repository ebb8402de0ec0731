"""What is watched becomes records on their way to workers: so many a second, and no more."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from tensortap import frameworks as arrays
from tensortap import ranks
from tensortap.errors import CaptureError
from tensortap.pipeline.ledger import DISCONNECTED
from tensortap.pipeline.pipeline import pipeline
from tensortap.pipeline.queue import Queue, write_to
from tensortap.pipeline.selection import CallCounters
from tensortap.record import Kind, Record, Summary
from tensortap.sources.observer import Seen, TrackOptions
from tensortap.sources.patterns import Patterns

Transform = Callable[[Any], Any]
_now = time.perf_counter_ns


class Rate:
    """At most so many a second of each key; None is no limit.

    >>> rate = Rate(0.001)
    >>> rate.due("fc"), rate.due("fc"), rate.due("conv")
    (True, False, True)
    """

    def __init__(self, rate: float | None) -> None:
        self._pause = 0 if rate is None or math.isinf(rate) else round(1e9 / rate)
        self._next: dict[object, int] = {}
        self._lock = threading.Lock()

    def due(self, key: object) -> bool:
        """Whether it is time for one; then the next has to wait."""
        if not self._pause:
            return True
        now = time.monotonic_ns()
        if now < self._next.get(key, 0):
            return False
        with self._lock:
            planned = self._next.get(key, 0)
            if now < planned:
                return False
            # from when it was due, not from now, or steps that fall in between lower the rate
            self._next[key] = max(planned + self._pause, now + self._pause // 2)
        return True


@dataclasses.dataclass
class Switches:
    """What is the same for everything that one watcher watches."""

    active: bool = True
    enabled: bool = True
    message: str = ""


class Watching:
    """Takes what hooks observe, and what is caught by hand, and hands it on."""

    def __init__(
        self,
        name: str,
        settings: TrackOptions,
        *,
        rate: float | None,
        ranks: Collection[int] | None,
        transform: Transform | None,
        keep: bool,
        route: Callable[[str], Queue | None],
    ) -> None:
        self._name = name
        self.settings = settings
        self.patterns = Patterns(settings.include, settings.exclude)
        self.switches = Switches()
        self.unseen: dict[str, str] = {}
        self._rate = Rate(rate)
        self._ranks = ranks
        self._transform = transform
        self._keep = keep
        self._route = route
        self._counters = CallCounters()

    def told(self, settings: TrackOptions, transform: Transform | None) -> Watching:
        """The same for some targets that are watched in another way."""
        found = copy.copy(self)
        found.settings, found._transform = settings, transform
        found.patterns = Patterns(settings.include, settings.exclude)
        return found

    @property
    def transform(self) -> Transform | None:
        """What is made of a value before it is copied."""
        return self._transform

    @property
    def active(self) -> bool:
        """Whether the watcher is open."""
        return self.switches.active

    @property
    def on(self) -> bool:
        """Whether anything is wanted now."""
        switches = self.switches
        return switches.active and switches.enabled

    @property
    def here(self) -> bool:
        """Whether this rank is one of those that watch."""
        return self._ranks is None or ranks.rank_and_world_size()[0] in self._ranks

    @property
    def step_number(self) -> int:
        """The training step that is under way."""
        return pipeline.clock.step or 0

    def due(self, name: str, kind: Kind) -> bool:
        """Whether one of this name is wanted, and so soon after the last."""
        return self._rate.due((name, kind)) and self.here

    def place(self, name: str, again: bool = False) -> tuple[int, int]:
        """The step and the call of a name; `again`: of the last one, which is computed anew."""
        counter = self._counters.of(name)
        if again:
            return counter.position(max(0, counter.calls - 1))
        return counter.count(pipeline.clock.step)

    def observe(
        self, seen: Seen, value: Any, step: int | None = None, stats: Summary | None = None
    ) -> Summary | None:
        """A value that is wanted: copied, and on its way."""
        if not self.on:
            return None
        start = _now()
        self._take(seen, value, self.step_number if step is None else step)
        pipeline.ledger.track(_now() - start)
        return None

    def _take(self, seen: Seen, value: Any, step: int) -> None:
        tags = {**seen.tags, "device": str(getattr(value, "device", "cpu"))}
        if self.switches.message:
            tags["message"] = self.switches.message
        if self._transform is not None:
            value = self._transformed(seen.name, value)
            if value is None:
                return
            kind, dtype, shape = arrays.describe(value)
            seen = seen._replace(type=seen.type or kind, dtype=dtype, shape=shape, shard=None)
        nbytes = arrays.nbytes_of(value)
        rank, world_size = ranks.rank_and_world_size()
        admitted = []
        for queue in self._queues(seen.name):
            if not queue.accepting:
                queue.ledger.drop_values(DISCONNECTED)
            elif queue.admit(nbytes, seen.name, seen.kind, step, rank):
                admitted.append(queue)
        if not admitted:
            return
        neutral, nbytes = arrays.snapshot(value, pipeline.pool)
        record = Record(
            seen.name, seen.kind, step, seen.call, pipeline.next_seq(), rank, world_size,
            time.time_ns(), seen.type, seen.dtype, seen.shape, seen.shard, None, neutral, None,
            tags,
        )  # fmt: skip
        for queue in admitted:  # each settles on its own: nobody waits for both
            write_to([queue], record, nbytes, captured=False)

    def _queues(self, name: str) -> list[Queue]:
        found = []
        queue = self._route(name)
        if queue is not None:
            found.append(queue)
        if self._keep:
            from tensortap.sources import init as run

            opened = run.opened()
            if opened is not None:
                found.append(opened.queue)
        return found

    def _transformed(self, name: str, value: Any) -> Any:
        """What the user makes of a value, on its device and out of sight of the training."""
        assert self._transform is not None
        before = getattr(value, "_version", None)
        try:
            with _no_grad():
                found = self._transform(value)
        except Exception as error:
            reason = f"transform raised for {name!r}: {type(error).__name__}: {error}"
            pipeline.fault(f"transform of {self._name}", CaptureError(reason))
            return None
        if getattr(value, "_version", None) != before:
            pipeline.fault(f"in-place transform of {self._name}", CaptureError(
                f"transform changed {name!r} in place, which changes the training: "
                "let it return a new tensor"
            ))  # fmt: skip
        return found


def _no_grad() -> contextlib.AbstractContextManager[Any]:
    torch = sys.modules.get("torch")
    found: contextlib.AbstractContextManager[Any] = (
        torch.no_grad() if torch is not None else contextlib.nullcontext()
    )
    return found
