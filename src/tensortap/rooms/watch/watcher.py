"""Watchers: targets with hooks, and the worker process that gets what they observe."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tensortap import values as arrays
from tensortap.capture.pipeline import pipeline
from tensortap.capture.queue import Queue
from tensortap.core.errors import NotFound
from tensortap.core.record import Kind
from tensortap.rooms.track.observing import Observed
from tensortap.rooms.track.options import NamePattern
from tensortap.rooms.watch.launch import Task
from tensortap.rooms.watch.sink import Worker
from tensortap.rooms.watch.watch_observer import ROOM, RateLimitedObserver, Transform
from tensortap.values.registry import parts

log = logging.getLogger("tensortap")


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

    def __init__(
        self, name: str, observer: RateLimitedObserver, task: Task, on_closed: Callable[[], None]
    ) -> None:
        self.name = name
        self._observer = observer
        observer.queue_of = self._queue
        self._task = task
        self._worker: Worker | None = None
        self._may_start = True  # once: a failure is not repeated with every record
        self._on_closed = on_closed
        self._attached: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "alive" if self.alive else "not running"
        return f"<Watcher {self.name!r}: {state}, {len(self._attached)} targets>"

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
        observer = self._observer.with_options(
            kind=kind, transform=transform, include=include, exclude=exclude
        )
        if isinstance(targets, (Mapping, list, tuple)) and not targets:
            raise ValueError("targets must not be empty: name what to watch")
        attached: list[str] = []
        try:
            for title, target in _named_targets(targets):
                self._attach(title, target, observer)
                attached.append(title)
        except BaseException:
            for title in attached:
                self.detach(title)
            raise

    def _attach(self, title: str, target: Any, observer: RateLimitedObserver) -> None:
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

    @property
    def unseen(self) -> dict[str, str]:
        """Modules whose outputs cannot be observed, with the reasons."""
        return dict(self._observer.unseen)

    # -- switches ------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether values are captured; each rank has its own switch."""
        return self._observer.switches.enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._observer.switches.enabled = enabled

    @property
    def message(self) -> str:
        """Text that records have from now on, in ``record.tags["message"]``."""
        return self._observer.switches.message

    @message.setter
    def message(self, message: Any) -> None:
        self._observer.switches.message = "" if message is None else str(message)

    # -- the worker ----------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Return whether the worker runs."""
        return self._worker is not None and self._worker.sink.alive

    @property
    def pid(self) -> int | None:
        """The process id of the worker; None before it is started."""
        return None if self._worker is None else self._worker.sink.pid

    @property
    def receipt(self) -> WatchReceipt:
        """Counts of the watched values, as the worker reports now."""
        worker = self._worker
        if worker is None:
            return WatchReceipt(0, 0, 0, {})
        worker.sink.ask(1.0)
        reasons = worker.sink.reasons()
        processed = worker.sink.counts.processed
        dropped = sum(reasons.values())
        return WatchReceipt(processed + worker.waiting, processed, dropped, dict(reasons))

    def start(self) -> None:
        """Start the worker, if this rank watches and is switched on."""
        if self.enabled and pipeline.enabled and self._observer.here:
            self._start_worker()

    def _start_worker(self) -> None:
        with self._lock:
            if self._may_start:
                self._may_start = False
                self._worker = Worker(self._task, pipeline.pool)

    def _queue(self) -> Queue | None:
        """Return the queue to the worker; None if it cannot be started."""
        if self._may_start:  # this rank was switched off so far
            self._start_worker()
        return None if self._worker is None else self._worker.queue

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything sent has been processed and written; return False on timeout."""
        return self._worker is None or self._worker.flush(timeout)

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
            self._may_start = False
            self.stop()
            for title in list(self._attached):
                self.detach(title)
        try:
            if self._worker is not None:
                self._worker.close(timeout, wait=wait)
        finally:
            self._on_closed()

    def stop(self) -> None:
        """Let the hooks capture nothing any more."""
        self._observer.switches.active = False

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
    if isinstance(targets, Mapping):
        for name in targets:
            if not isinstance(name, str) or not name:
                raise TypeError(f"names of targets must be non-empty strings, got {name!r:.80}")
        return list(targets.items())
    if isinstance(targets, (list, tuple)):
        return [(f"{type(target).__name__}{i}", target) for i, target in enumerate(targets)]
    return [("", targets)]
