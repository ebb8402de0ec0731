"""`watch`: your own code on live tensors, in a process of its own."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from tensortap import frameworks as arrays
from tensortap.errors import NotFound, TensortapError
from tensortap.pipeline.exit import at_exit
from tensortap.pipeline.pipeline import pipeline
from tensortap.pipeline.queue import Queue
from tensortap.record import Kind, Record
from tensortap.server import worker_start as begin
from tensortap.settings import buffer_size, flag
from tensortap.sinks.launch import EntryPoints, Task, check_start_method, pickled
from tensortap.sinks.worker import Worker
from tensortap.sources.observer import Seen, TrackOptions
from tensortap.sources.patterns import NamePattern
from tensortap.sources.watch_options import (
    check_functions,
    check_options,
    ranks_of,
    refuse_to_change,
    settings_of,
    titled,
)
from tensortap.sources.watching import Transform, Watching
from tensortap.wire.worker import leave_main

log = logging.getLogger("tensortap")

_ENTRY_POINTS = EntryPoints(begin.spawned, begin.served, begin.forked, begin.functions_for)
_EACH = 32  # records of one name that wait in a worker, at least; two seconds' worth if more
_EACH_UNLIMITED = 1024


@dataclasses.dataclass(frozen=True)
class WatchReceipt:
    """What has become of what was watched.

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
    """Workers and what they watch; made by `watch`, ended by `close` or by a ``with``."""

    def __init__(
        self,
        name: str,
        watching: Callable[[str, Callable[[str], Any]], Watching],
        tasks: list[Task],
    ) -> None:
        self.name = name
        self._tasks = tasks
        self._workers: list[Worker] = []
        self._attached: dict[str, Any] = {}
        self._routes: dict[str, int] = {}
        self._lock = threading.RLock()
        self._closed = False
        self._failed = False  # to start the workers
        self._watching = watching(name, self._route)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "alive" if self.alive else "not running"
        return f"<Watcher {self.name!r}: {state}, {len(self._attached)} targets>"

    # -- what is watched -----------------------------------------------------------------

    def attach(
        self,
        targets: Any,
        *,
        what: str | None = None,
        transform: Transform | None = None,
        include: NamePattern = None,
        exclude: NamePattern = None,
    ) -> None:
        """Watch more: a module, a parameter, a tensor, a list or a dict of them by name.

        What is not said here is as `watch` was told.
        """
        if self._closed:
            raise RuntimeError(f"the watcher {self.name!r} is closed: call tap.watch(...) again")
        watching = self._watching
        if any(option is not None for option in (what, transform, include, exclude)):
            check_functions(None, None, transform)
            settings = settings_of(what, include, exclude, watching.settings)
            watching = watching.told(settings, transform or watching.transform)
        done: list[str] = []
        try:
            for title, target in titled(targets):
                self._attach(title, target, watching)
                done.append(title)
        except BaseException:
            for title in done:
                self.detach(title)
            raise

    def _attach(self, title: str, target: Any, watching: Watching) -> None:
        with self._lock:
            if title in self._attached:
                what = f"{title!r} is" if title else "a model without a name is"
                raise ValueError(f"{what} watched already: name it with a dict, {{'name': target}}")
            found = None
            if "torch" in sys.modules:
                from tensortap.frameworks.torch.watch import watched

                found = watched(target, watching, title)
            if found is None:
                raise TypeError(
                    f"a {type(target).__name__} cannot be watched: give a torch module, parameter "
                    "or tensor, a list or a dict of them; take any other value where it is "
                    "computed, with watcher.catch(value, name)"
                )
            self._attached[title] = found
            try:
                found.attach()
            except BaseException:
                self.detach(title)
                raise

    def detach(self, title: str) -> None:
        """Watch this no more; its name is the one it was given in a dict."""
        with self._lock:
            if title not in self._attached:
                known = ", ".join(map(repr, self._attached)) or "nothing"
                raise NotFound(f"{title!r} is not watched; there is {known}")
            self._attached.pop(title).detach()

    def catch(self, value: Any, name: str) -> None:
        """Hand a value of any framework to the worker, if it is time for one of its name."""
        watching = self._watching
        if not watching.on or not pipeline.enabled:
            return
        try:
            step, call = watching.place(name)
            if watching.due(name, Kind.VALUE):
                seen = Seen(name, Kind.VALUE, call, *arrays.describe(value))
                watching.observe(seen, value, step)
        except Exception as error:
            pipeline.fault(name, error)

    @property
    def unseen(self) -> dict[str, str]:
        """What cannot be observed, and why."""
        return dict(self._watching.unseen)

    # -- switches ------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether anything is taken; each rank has its own switch."""
        return self._watching.switches.enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._watching.switches.enabled = enabled

    @property
    def message(self) -> str:
        """Words that go with every record from here on, in ``record.tags["message"]``."""
        return self._watching.switches.message

    @message.setter
    def message(self, message: Any) -> None:
        self._watching.switches.message = "" if message is None else str(message)

    # -- the workers ---------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether all workers run."""
        workers = self._workers
        return bool(workers) and all(worker.sink.alive for worker in workers)

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [worker.sink.pid for worker in self._workers]

    @property
    def receipt(self) -> WatchReceipt:
        """What has become of what was watched, as the workers say now."""
        workers = list(self._workers)
        reasons: collections.Counter[str] = collections.Counter()
        for worker in workers:
            worker.sink.ask(1.0)
            reasons.update(worker.sink.reasons())
        processed = sum(worker.sink.processed for worker in workers)
        waiting = sum(worker.waiting for worker in workers)
        return WatchReceipt(processed + waiting, processed, reasons.total(), dict(reasons))

    def _start(self) -> None:
        """Start the workers, unless this rank does not watch or nothing is to be taken yet."""
        with self._lock:
            if self._workers or self._closed or self._failed:
                return
            self._failed = True  # not tried again with every record
            arena = not flag("TENSORTAP_NO_ARENA")
            for task in self._tasks:
                self._workers.append(Worker(task, pipeline.pool, arena=arena))
            self._failed = False

    def _route(self, name: str) -> Queue | None:
        if not self._workers:
            self._start()  # this rank had been off, or unknown, so far
        workers = self._workers
        if len(workers) < 2:
            return workers[0].queue if workers else None
        number = self._routes.get(name)
        if number is None:
            with self._lock:  # in turns: each has as many names as the others
                number = self._routes.setdefault(name, len(self._routes) % len(workers))
        return workers[number].queue

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was sent has been processed and is in its files; False if not."""
        deadline = time.monotonic() + (self._tasks[0].timeout if timeout is None else timeout)
        # each is asked, also when the time is over
        done = [worker.flush(max(0.0, deadline - time.monotonic())) for worker in self._workers]
        return all(done)

    def close(self, timeout: float | None = None) -> None:
        """Take no more, wait until all that was sent has been processed, and end the workers.

        Waits at most `timeout` seconds, by default those that were given to `watch`.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._watching.switches.active = False
            for title in list(self._attached):
                self._attached.pop(title).detach()
        try:
            # at the same time: each has the whole of it
            threads = [threading.Thread(target=worker.close, args=(timeout,), daemon=True)
                       for worker in self._workers[1:]]  # fmt: skip
            for thread in threads:
                thread.start()
            for worker in self._workers[:1]:
                worker.close(timeout)
            for thread in threads:
                thread.join()
        finally:
            with _lock:
                _running.pop(self.name, None)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *error: object) -> None:
        # whatever was raised goes through: nothing here may take its place
        try:
            self.close()
        except Exception:
            if not error or error[0] is None:
                raise
            log.exception("tensortap: while watching ended")


def watch(
    targets: Any = None,
    recorder: Any = None,
    *,
    on_record: Callable[[Record], object] | None = None,
    on_close: Callable[[], object] | None = None,
    rate: float | None = 20.0,
    timeout: float = 30.0,
    start_method: str = "spawn",
    daemon: bool = False,
    transform: Transform | None = None,
    processes: int = 1,
    name: str | None = None,
    what: str | None = None,
    ranks: int | str | Iterable[int] = 0,
    keep: bool = False,
    restart: bool = False,
    enabled: bool = True,
    include: NamePattern = None,
    exclude: NamePattern = None,
) -> Watcher:
    """Run your own code on live tensors, in another process: ``tap.watch(model, on_record=f)``.

    `targets` are a torch model or module (with all modules in it), a parameter, a tensor (its
    gradients), a list or a dict of them by name. `recorder` is a `tap.Recorder`, or a function of
    a record as `on_record` is; it runs in the worker, as slowly as it likes, and `on_close` there
    at the end. `what` is "outputs", as is taken where it is not said, "gradients" or "both". At
    most `rate` records a second are taken of each name, and newer ones replace those that wait.
    `transform` runs here, before anything is copied. `processes` share the names. `timeout` is how
    long the end may take, for `close` and for workers whose program has gone. `start_method` is
    "spawn", "fork" or "forkserver"; with `daemon` the end of the program does not wait for the
    worker, which finishes by itself. Rank 0 watches, or those of `ranks`, or ``ranks="all"``.
    `keep` puts the records into the open run as well. A worker that dies is reported, and with
    `restart` started again.

    With the `name` of a watcher that runs, the targets are attached to that one; `what`,
    `transform`, `include` and `exclude` are then for these targets.
    """
    given = dict(locals())
    leave_main()
    _refuse_while_importing()
    function = recorder if on_record is None else on_record
    if name is not None and function is None and on_close is None and name in _running:
        refuse_to_change(name, given, inspect.signature(watch))
        found = _running[name]
        found.attach(targets, what=what, transform=transform, include=include, exclude=exclude)
        return found
    if function is None or (recorder is not None and on_record is not None):
        known = f"; no watcher is called {name!r}" if name is not None else ""
        raise TypeError(f"watch needs a recorder, or on_record=, one of them{known}")
    check_functions(function, on_close, transform)
    check_options(rate, processes, timeout, name)
    check_start_method(start_method)
    settings = settings_of(what or "outputs", include, exclude, TrackOptions(only_training=False))
    wanted_ranks = ranks_of(ranks)

    def watching(name: str, route: Callable[[str], Any]) -> Watching:
        return Watching(
            name, settings, rate=rate, ranks=wanted_ranks, transform=transform, keep=keep,
            route=route,
        )  # fmt: skip

    budget = buffer_size() // processes
    each = _EACH_UNLIMITED if rate is None else int(min(max(_EACH, 2 * rate), _EACH_UNLIMITED))
    with _lock:
        name = _free_name() if name is None else name
        if name in _running:
            raise ValueError(
                f"a watcher called {name!r} runs already: give another name, or attach to it "
                "with tap.watch(targets, name=...) alone"
            )
        tasks = [
            Task(
                name if processes == 1 else f"{name} {number}", function, on_close, _ENTRY_POINTS,
                start_method, timeout, each, budget, restart, daemon,
            )
            for number in range(processes)
        ]  # fmt: skip
        pickled(tasks[0])  # what cannot be sent is said now, also where the worker starts later
        watcher = Watcher(name, watching, tasks)
        watcher.enabled = enabled
        _running[name] = watcher
    try:
        _register_exit()
        if targets is not None:
            watcher.attach(targets)
        if enabled and pipeline.enabled and watcher._watching.here:
            watcher._start()
    except BaseException:
        watcher.close(1.0)
        raise
    return watcher


def _refuse_while_importing() -> None:
    """A process that multiprocessing starts imports the main module: it must not watch again."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and getattr(process.current_process(), "_inheriting", False):
        raise TensortapError(
            "tap.watch was called while multiprocessing imports the main module in a process of "
            "its own: put the training under if __name__ == '__main__'"
        )


def watcher(name: str | None = None) -> Watcher:
    """The watcher that runs, from anywhere in the program; by `name` if there are several."""
    found = dict(_running)
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name is not None and name in found:
        return found[name]
    known = ", ".join(map(repr, found)) or "none: call tap.watch(...) first"
    which = "several watchers run, say which" if name is None and found else f"no watcher {name!r}"
    raise NotFound(f"{which}; there are {known}" if found else f"no watcher runs, {known}")


def _free_name() -> str:
    number = 1
    while (name := "watch" if number == 1 else f"watch-{number}") in _running:
        number += 1
    return name


_running: dict[str, Watcher] = {}
_inherited: list[Watcher] = []
_lock = threading.Lock()
_registered = False


def _register_exit() -> None:
    """Films are complete when the program ends, however it does that by itself."""
    global _registered
    if _registered:
        return
    _registered = True
    # before ours is registered: what it registers waits for all children, so it must come later
    import multiprocessing.util  # noqa: F401

    at_exit(_close_all, priority=20)


def _close_all() -> None:
    for found in list(_running.values()):
        try:
            found.close()
        except Exception:
            log.exception("tensortap: the watcher %r could not be closed", found.name)


def _after_fork() -> None:
    # the hooks were copied, too; the workers are the parent's. Kept, not closed: its sockets and
    # threads must not be touched here
    global _lock, _registered
    for found in _running.values():
        found._watching.switches.active = False
        _inherited.append(found)
    _running.clear()
    _lock, _registered = threading.Lock(), False


os.register_at_fork(after_in_child=_after_fork)
