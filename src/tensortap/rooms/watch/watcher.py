"""Watchers: targets with hooks, and the worker process that gets what they observe."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tensortap import values as arrays
from tensortap.capture.ledger import DISCONNECTED
from tensortap.capture.pipeline import pipeline
from tensortap.capture.queue import Queue
from tensortap.capture.selection import CallCounters
from tensortap.core import ranks
from tensortap.core.errors import NotFound
from tensortap.core.limits import format_size
from tensortap.core.record import Kind
from tensortap.rooms.track.observing import Observed
from tensortap.rooms.track.options import NamePattern
from tensortap.rooms.watch.sink import Task, WorkerSink, memory_left, needed_memory
from tensortap.rooms.watch.watch_observer import (
    ROOM,
    RateLimit,
    TargetObserver,
    Transform,
    WatchSelection,
)
from tensortap.values.registry import parts

log = logging.getLogger("tensortap")

PATIENCE = 5.0  # seconds of waiting at the end before a message says for what


@dataclasses.dataclass(frozen=True)
class WatchReceipt:
    """Counts of watched values: captured, processed, dropped.

    `captured` records were copied and not dropped afterwards, and of them `processed` went through
    the user's function. `dropped` values did not: the queue or the worker was over budget, the
    worker died or ran out of time ("disconnected"), or the function raised ("error").
    """

    captured: int
    processed: int
    dropped: int
    reasons: dict[str, int]

    @property
    def waiting(self) -> int:
        """Records that are still on their way."""
        return self.captured - self.processed


class Watcher:
    """A worker and what it watches; made by `watch`, ended by `close` or a ``with`` statement."""

    enabled: bool
    """True while values are captured; each rank has its own switch."""

    message: Any = ""
    """Text that records have from now on, in ``record.tags["message"]``."""

    unseen: dict[str, str]
    """Modules whose outputs cannot be observed, with the reasons."""

    def __init__(
        self,
        task: Task,
        selection: WatchSelection,
        options: Mapping[str, Any],
        *,
        rate: float | None,
        ranks: Collection[int] | None,
        on_closed: Callable[[Watcher], None],
    ) -> None:
        self.name = task.name
        self.options = options  # as they were passed to `watch`
        self.enabled = options["enabled"]
        self.unseen = {}
        self.active = True  # until it is closed
        self.every: int = options["every"]
        self.limit = RateLimit(rate)
        self.counters = CallCounters()
        self._ranks = ranks
        self._task = task
        self._observer = TargetObserver(self, selection)
        self._sink: WorkerSink | None = None
        self._queue: Queue | None = None  # in front of the sink
        self.dropped = 0  # values for which no worker could be started
        self._may_start = True  # once: a failure is not repeated with every record
        self._on_closed = on_closed
        self._attached: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "alive" if self.alive else "not running"
        return f"<Watcher {self.name!r}: {state}, {len(self._attached)} targets>"

    @property
    def here(self) -> bool:
        """True if this rank watches."""
        return self._ranks is None or ranks.rank_and_world_size()[0] in self._ranks

    # -- targets -------------------------------------------------------------------------

    def attach(
        self,
        targets: Any,
        *,
        kind: str | None = None,
        transform: Transform | None = None,
        include: NamePattern = None,
        exclude: NamePattern = None,
    ) -> None:
        """Watch more: a module, a parameter, a tensor, or a list or dict of them.

        Options that are not given are those of the watcher.
        """
        if self._closed:
            raise RuntimeError(f"the watcher {self.name!r} is closed: call tap.watch(...) again")
        selection = self._observer.selection.updated(
            kind=kind, transform=transform, include=include, exclude=exclude
        )
        observer = TargetObserver(self, selection)
        attached: list[str] = []
        try:
            for title, target in _named_targets(targets):
                self._attach(title, target, observer)
                attached.append(title)
        except BaseException:
            for title in attached:
                self.detach(title)
            raise

    def _attach(self, title: str, target: Any, observer: TargetObserver) -> None:
        with self._lock:
            if title in self._attached:
                what = f"{title!r}" if title else "a target without a name"
                raise ValueError(f"{what} is already being watched; pass {{'other_name': target}}")
            offers = (part.hooks_on(target, observer, title) for part in parts(ROOM))
            hooks = next((offer for offer in offers if offer is not None), None)
            if hooks is None:
                raise TypeError(
                    f"targets must be torch modules, parameters or tensors, or a list or dict of "
                    f"them, got {type(target).__name__}; for other values call "
                    "watcher.catch(value, name) where they are computed"
                )
            self._attached[title] = hooks
            try:
                hooks.attach()
            except BaseException:
                self.detach(title)
                raise

    def detach(self, title: str) -> None:
        """Stop watching a target, by its name in the dict that was passed."""
        with self._lock:
            if title not in self._attached:
                known = ", ".join(map(repr, self._attached)) or "nothing"
                raise NotFound(f"{title!r} is not being watched; watched are {known}")
            self._attached.pop(title).detach()

    def catch(self, value: Any, name: str) -> None:
        """Send a value of any framework to the worker, unless the rate skips it."""
        observer = self._observer
        if not observer.capturing:
            return
        try:
            step, call = observer.place(name)
            if observer.due(name, Kind.VALUE):
                observed = Observed(name, Kind.VALUE, call, *arrays.describe(value))
                observer.observe(observed, value, step)
        except Exception as error:
            pipeline.fault(name, error)

    # -- the worker ----------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._sink is not None and self._sink.alive

    @property
    def died(self) -> bool:
        """Return whether the worker ended before it was told to."""
        return self._sink is not None and self._sink.died

    @property
    def pid(self) -> int | None:
        """The process id of the worker; None before it is started."""
        return None if self._sink is None else self._sink.pid

    @property
    def receipt(self) -> WatchReceipt:
        """Counts of the watched values, as the worker last reported."""
        if self._sink is None:
            return WatchReceipt(0, 0, self.dropped, {DISCONNECTED: self.dropped})
        waiting, reasons = self._waiting, dict(self._sink.reasons())
        processed = self._sink.counts.processed
        return WatchReceipt(processed + waiting, processed, sum(reasons.values()), reasons)

    @property
    def _waiting(self) -> int:
        """Number of records that are queued, on their way, or in the worker and not processed."""
        if self._queue is None or self._sink is None:
            return 0
        return self._queue.waiting + self._sink.outstanding

    def start(self) -> None:
        """Start the worker, if this rank watches and is switched on."""
        if self.enabled and pipeline.enabled and self.here:
            self.queue()

    def queue(self) -> Queue | None:
        """Return the queue to the worker, which is started if need be; None if that failed."""
        if self._may_start:  # else this rank was switched on before
            with self._lock:
                if self._may_start:
                    self._may_start = False
                    needed = needed_memory(self._task.recorder)
                    if not memory_left(needed):
                        log.error(
                            "tensortap: worker %r was not started: it needs about %s, and too "
                            "little memory is left; training continues without it",
                            self.name, format_size(needed),
                        )  # fmt: skip
                        return None
                    self._sink = WorkerSink(self._task, pipeline.pool)
                    budget, name = self._sink.budget, f"worker-{self.name}"
                    self._queue = Queue(self._sink, budget=budget, name=name)
        return self._queue

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything sent has been processed and written; return False on timeout."""
        if self._queue is None or self._sink is None:
            return True
        deadline = time.monotonic() + (self._task.timeout if timeout is None else timeout)
        if not self._queue.flush(max(0.0, deadline - time.monotonic())):
            return False
        return self._sink.wait_until_processed(max(0.0, deadline - time.monotonic()))

    def close(self, timeout: float | None = None) -> None:
        """Remove the hooks, wait until everything sent is processed, and end the worker.

        Waits at most `timeout` seconds, by default the timeout of `watch`.
        """
        self._close(timeout, wait=True)

    def close_at_exit(self) -> None:
        """Close at the end of the program, which waits unless the worker is a daemon."""
        self._close(None, wait=not self._task.daemon)

    def _close(self, timeout: float | None, wait: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._may_start = self.active = False
            for title in list(self._attached):
                self.detach(title)
        try:
            if self._queue is not None and self._sink is not None:
                deadline = time.monotonic() + (self._task.timeout if timeout is None else timeout)
                self._end_worker(self._queue, self._sink, deadline, wait)
        finally:
            self._on_closed(self)

    def _end_worker(self, queue: Queue, sink: WorkerSink, deadline: float, wait: bool) -> None:
        """Let the worker process everything, close its files and end.

        Without `wait`, it does so after the program has ended.
        """
        sink.closing = True
        try:
            if sink.alive:
                self._finish(queue, sink, deadline, wait)
        finally:
            queue.close(0.0)
        if sink.lost and not sink.died:
            log.warning(
                "tensortap: worker %r did not process %d records before its time was up; "
                "increase timeout=", self.name, sink.lost,
            )  # fmt: skip

    def _finish(self, queue: Queue, sink: WorkerSink, deadline: float, wait: bool) -> None:
        warn_at = time.monotonic() + PATIENCE
        try:
            # leave the worker some of the time, to process what it has and to close its files
            until = time.monotonic() + (deadline - time.monotonic()) * 0.75
            while sink.alive and (left := until - time.monotonic()) > 0:
                if queue.flush(min(left, 0.5)):
                    break
                warn_at = self._warn(warn_at, deadline)
        finally:  # also when the user interrupts: the worker closes its files all the same
            sink.end(deadline - time.monotonic())
        if not wait:
            sink.let_go()
            return
        while not sink.wait_for_exit(0.5) and time.monotonic() < deadline + 2.0:
            warn_at = self._warn(warn_at, deadline)
        if sink.alive:
            log.warning("tensortap: worker %r hung and was killed", self.name)
            sink.kill()
            sink.wait_for_exit(5.0)

    def _warn(self, warn_at: float, deadline: float) -> float:
        """Log once why the program does not end; return when to log next."""
        if time.monotonic() < warn_at or not self.alive:
            return warn_at
        log.warning(
            "tensortap: worker %r still has %d records to process; waiting %.0f more seconds "
            "(timeout=)", self.name, self._waiting, deadline - time.monotonic(),
        )  # fmt: skip
        return math.inf

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.close()
        except Exception:
            if not error or error[0] is None:  # else the user's exception goes first
                raise
            log.exception("tensortap: error while ending a watcher")


def _named_targets(targets: Any) -> list[tuple[str, Any]]:
    """Return each target with the prefix of its names."""
    if isinstance(targets, (Mapping, list, tuple)) and not targets:
        raise ValueError("targets must not be empty: name what to watch")
    if isinstance(targets, Mapping):
        for name in targets:
            if not isinstance(name, str) or not name:
                raise TypeError(f"names of targets must be non-empty strings, got {name!r:.80}")
        return list(targets.items())
    if isinstance(targets, (list, tuple)):
        return [(f"{type(target).__name__}{i}", target) for i, target in enumerate(targets)]
    return [("", targets)]
