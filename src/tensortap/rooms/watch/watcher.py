"""`watch`: run your own code on live tensors, in another process, with hooks on its targets."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tensortap import values as arrays
from tensortap.capture.ledger import DISCONNECTED
from tensortap.capture.pipeline import at_exit, pipeline
from tensortap.capture.queue import Queue
from tensortap.capture.selection import CallCounters
from tensortap.core import ranks
from tensortap.core.arguments import check_callable, check_count, check_positive, check_text
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.limits import format_size
from tensortap.core.record import Kind, Record
from tensortap.core.settings import buffer_size
from tensortap.rooms.track.observing import Observed
from tensortap.rooms.track.options import NamePattern
from tensortap.rooms.watch.sink import (
    Task,
    WorkerSink,
    memory_left,
    needed_memory,
    with_start_method,
)
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
                    try:
                        self._start_worker()
                    except (TensortapError, OSError, RuntimeError, MemoryError) as error:
                        log.error(
                            "tensortap: worker %r was not started: %s; training continues "
                            "without it", self.name, str(error) or "no memory is left",
                        )  # fmt: skip
        return self._queue

    def _start_worker(self) -> None:
        """Start the process and the queue to it; raise if there is no room for them."""
        needed = needed_memory(self._task.recorder)
        if not memory_left(needed):
            size = format_size(needed)
            raise TensortapError(f"it needs about {size}, and too little memory is left")
        sink = WorkerSink(self._task, pipeline.pool)
        try:
            self._queue = Queue(sink, budget=sink.budget, name=f"worker-{self.name}")
        except BaseException:
            sink.kill()
            sink.closing = True
            sink.close()
            raise
        self._sink = sink

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
            with _lock:
                _running.pop(self.name, None)

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


# -- the verb, and the watchers that run ------------------------------------------------

_UNNAMED = "watch"  # the watcher that calls without a name start, and then join


def watch(
    targets: Any = None,
    recorder: Any = None,
    *,
    on_record: Callable[[Record], object] | None = None,
    on_close: Callable[[], object] | None = None,
    every: int = 1,
    rate: float | str | None = "auto",
    timeout: float = 30.0,
    start_method: str | None = None,
    daemon: bool = False,
    transform: Transform | None = None,
    name: str | None = None,
    kind: str | None = None,
    rank: int | str | Iterable[int] = 0,
    enabled: bool = True,
    include: NamePattern = None,
    exclude: NamePattern = None,
) -> Watcher:
    """Run your own code on live tensors, in another process: ``tap.watch(model, on_record=f)``.

    `targets` are a torch model or module (with all modules in it), a parameter, a tensor (its
    gradients), or a list or dict of them. `recorder` is a `tap.Recorder`, or a function of a
    record like `on_record`; it runs in the worker, and `on_close` at its end. `kind` is "outputs"
    (the default), "gradients" or "both". `every` captures each n-th call of a name. At most `rate`
    records per second are captured of each name (by default 20, or with `every` any number), and
    newer ones replace those that wait. `transform` runs in this process, before
    anything is copied. `timeout` limits the time that `close`, or a worker whose program has died,
    may take. `start_method` is "spawn" or "fork"; by default a function of the main module, which a
    spawned worker cannot import, is forked. With `daemon`, the program ends without waiting for
    the worker, which finishes on its own. Rank 0 watches, or the given `rank`, several, or
    ``rank="all"``. A worker that dies is reported, and training continues.

    A second call without a `name` adds its targets to the watcher that runs, and returns it.
    """
    function = recorder if on_record is None else on_record
    options: dict[str, Any] = {
        "on_close": on_close, "every": every, "rate": rate, "timeout": timeout,
        "start_method": start_method, "daemon": daemon, "rank": rank, "enabled": enabled,
    }  # fmt: skip
    selection: dict[str, Any] = {
        "kind": kind, "include": include, "exclude": exclude, "transform": transform,
    }  # fmt: skip
    if recorder is not None and on_record is not None:
        raise TypeError("pass either recorder or on_record")
    first = _running.get(_UNNAMED) if name is None else None
    if first is not None and first.died:
        first.close()
    elif first is not None:
        _check_same(first, function, options)
        if targets is not None:
            first.attach(targets, **selection)
        return first
    with _lock:
        started = _new_watcher(name or _UNNAMED, function, options, selection)
        _running[started.name] = started
    try:
        _register_exit()
        if targets is not None:
            started.attach(targets)
        started.start()
    except BaseException:
        started.close(1.0)
        raise
    return started


def _check_same(running: Watcher, function: Any, options: dict[str, Any]) -> None:
    """Raise if a call joins a watcher, but asks for another function or other options."""
    defaults = watch.__kwdefaults__ or {}
    others = [option for option, value in options.items()
              if value not in (defaults[option], running.options[option])]  # fmt: skip
    if function is not None and function != running.options["function"]:
        others.insert(0, "recorder")
    if others:
        raise ValueError(
            f"a watcher without a name is already running, with another {', '.join(others)}: end "
            "it with tap.watcher().close(), or pass name= for a worker of its own"
        )


def _new_watcher(
    name: str, function: Any, options: dict[str, Any], selection: dict[str, Any]
) -> Watcher:
    """Check the options of `watch`; return a watcher that has not started."""
    if function is None:
        raise TypeError("pass either recorder or on_record")
    check_callable("on_record", function)
    if isinstance(function, type):
        made = f"{function.__name__}(...)"
        raise TypeError(f"on_record must be a function or an object, got a class; pass {made}")
    every, rate, on_close = options["every"], options["rate"], options["on_close"]
    if on_close is not None:
        check_callable("on_close", on_close)
    check_count("every", every)
    if isinstance(rate, str) and rate == "auto":
        rate = 20.0 if every == 1 else None  # a choice of calls needs no limit
    if rate is not None:
        check_positive("rate", rate)
    check_positive("timeout", options["timeout"])
    check_text("name", name)
    if name in _running:
        raise ValueError(
            f"a watcher named {name!r} is already running; pass another name, or attach targets "
            f"to it with tap.watcher({name!r}).attach(...)"
        )
    # records of one name that may wait in the worker: two seconds' worth, within reason
    waiting = 1024 if rate is None else int(min(max(32, 2 * rate), 1024))
    task = Task(
        name, function, on_close, options["timeout"], waiting, buffer_size(), options["daemon"]
    )
    # raises now if it cannot be sent, even if the worker starts later
    task = with_start_method(task, options["start_method"])
    return Watcher(
        task, WatchSelection().updated(**selection), {"function": function, **options},
        rate=rate, ranks=_selected_ranks(options["rank"]),
    )  # fmt: skip


def _selected_ranks(rank: Any) -> frozenset[int] | None:
    """Return the ranks that watch; None stands for all."""
    if rank == "all":
        return None
    single = isinstance(rank, (int, str)) or not isinstance(rank, Iterable)
    selected = frozenset([rank] if single else rank)
    if not selected:
        raise ValueError("rank must not be empty: name a rank, or 'all'")
    if not all(isinstance(rank, int) for rank in selected):
        raise TypeError(f"rank must be a rank, several ranks, or 'all', got {rank!r:.80}")
    return selected


def watcher(name: str | None = None) -> Watcher:
    """Return a running watcher, from anywhere in the program.

    Without a name: the one that was started without, or the only one.
    """
    running = dict(_running)
    if not running:
        raise NotFound("no watcher is running: call tap.watch(...) first")
    if name is None:
        name = next(iter(running)) if len(running) == 1 else _UNNAMED
    if name not in running:
        raise NotFound(f"no watcher {name!r}; running are {', '.join(map(repr, running))}")
    return running[name]


_running: dict[str, Watcher] = {}
_inherited: list[Watcher] = []
_lock = threading.Lock()
_registered = False


def _register_exit() -> None:
    """Close the watchers when the program ends, so that films are complete."""
    global _registered
    if _registered:
        return
    _registered = True
    # first: its own exit function waits for all children, so it must run after ours
    import multiprocessing.util  # noqa: F401

    at_exit(_close_all, priority=20)


def _close_all() -> None:
    for one in list(_running.values()):
        try:
            one.close_at_exit()
        except Exception:
            log.exception("tensortap: the watcher %r could not be closed", one.name)


def _after_fork() -> None:
    # the workers belong to the parent: kept, not closed, so that sockets and threads stay untouched
    global _lock, _registered
    for one in _running.values():
        one.active = False
        _inherited.append(one)
    _running.clear()
    _lock, _registered = threading.Lock(), False


os.register_at_fork(after_in_child=_after_fork)
