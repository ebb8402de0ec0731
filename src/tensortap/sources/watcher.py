"""Watchers: targets with hooks, and the workers that get what they observe."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from tensortap import frameworks as arrays
from tensortap.errors import NotFound
from tensortap.frameworks.observing import Observed
from tensortap.frameworks.registry import loaded_frameworks
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind
from tensortap.sources.checks import check_callable
from tensortap.sources.patterns import NamePattern
from tensortap.sources.watch_observer import RateLimitedObserver, Transform
from tensortap.sources.watch_options import named_targets
from tensortap.sources.watch_workers import WatchReceipt, WorkerPool

log = logging.getLogger("tensortap")


class Watcher:
    """Workers and what they watch; made by `watch`, ended by `close` or a ``with`` statement."""

    def __init__(
        self,
        name: str,
        observer: RateLimitedObserver,
        workers: WorkerPool,
        on_closed: Callable[[], None],
    ) -> None:
        self.name = name
        self._observer = observer
        self._workers = workers
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
        what: str | None = None,
        transform: Transform | None = None,
        include: NamePattern = None,
        exclude: NamePattern = None,
    ) -> None:
        """Watch more: a module, a parameter, a tensor, or a list or dict of them.

        Options that are not given are those of the watcher.
        """
        if self._closed:
            raise RuntimeError(f"the watcher {self.name!r} is closed: call tap.watch(...) again")
        observer = self._observer
        if any(option is not None for option in (what, transform, include, exclude)):
            if transform is not None:
                check_callable("transform", transform)
            selection = observer.selection.updated(what, include, exclude)
            observer = observer.with_options(selection, transform)
        attached: list[str] = []
        try:
            for title, target in named_targets(targets):
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
            offers = (each.watch(target, observer, title) for each in loaded_frameworks())
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

    # -- workers -------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether all workers run."""
        return self._workers.alive

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return self._workers.pids

    @property
    def receipt(self) -> WatchReceipt:
        """What has become of the watched values, as the workers report now."""
        return self._workers.receipt()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything sent has been processed and written; return False on timeout."""
        return self._workers.flush(timeout)

    def start(self) -> None:
        """Start the workers, if this rank watches and is switched on."""
        if self.enabled and pipeline.enabled and self._observer.here:
            self._workers.start()

    def close(self, timeout: float | None = None) -> None:
        """Remove the hooks, wait until everything sent is processed, and end the workers.

        Waits at most `timeout` seconds, by default the timeout of `watch`.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.stop()
            for title in list(self._attached):
                self.detach(title)
        try:
            self._workers.close(timeout)
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
