"""`watch`: run your own code on live tensors, in another process."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from tensortap.errors import NotFound, TensortapError
from tensortap.pipeline.exit import at_exit
from tensortap.record import Record
from tensortap.server import worker_start
from tensortap.settings import buffer_size
from tensortap.sinks.launch import EntryPoints, Task, check_start_method, pickled
from tensortap.sources.patterns import NamePattern
from tensortap.sources.watch_observer import RateLimitedObserver, Transform
from tensortap.sources.watch_options import (
    WatchSelection,
    check_options,
    check_unchanged,
    selected_ranks,
)
from tensortap.sources.watch_workers import WorkerPool
from tensortap.sources.watcher import Watcher
from tensortap.wire.worker import end_main_import

log = logging.getLogger("tensortap")

_ENTRY_POINTS = EntryPoints(
    worker_start.spawned, worker_start.served, worker_start.forked, worker_start.functions_for
)
_MIN_WAITING = 32  # records of one name that may wait in a worker; or two seconds' worth, if more
_MAX_WAITING = 1024


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
    gradients), or a list or dict of them. `recorder` is a `tap.Recorder`, or a function of a
    record like `on_record`; it runs in the worker, and `on_close` at its end. `what` is "outputs"
    (the default), "gradients" or "both". At most `rate` records per second are captured of each
    name, and newer ones replace those that wait. `transform` runs in this process, before
    anything is copied. `processes` share the names. `timeout` limits the time that `close`, or a
    worker whose program has died, may take. `start_method` is "spawn", "fork" or "forkserver".
    With `daemon`, the program ends without waiting for the worker, which finishes on its own.
    Rank 0 watches, or the given `ranks`, or ``ranks="all"``. `keep` also writes the records to
    the open run. A worker that dies is reported, and with `restart` started again.

    With the `name` of a running watcher, the targets are attached to it; `what`, `transform`,
    `include` and `exclude` then apply to these targets.
    """
    given = dict(locals())
    end_main_import()
    _check_not_importing_main()
    function = recorder if on_record is None else on_record
    if name is not None and function is None and on_close is None and name in _running:
        check_unchanged(name, given, inspect.signature(watch))
        found = _running[name]
        found.attach(targets, what=what, transform=transform, include=include, exclude=exclude)
        return found
    if function is None or (recorder is not None and on_record is not None):
        known = f"; no watcher is called {name!r}" if name is not None else ""
        raise TypeError(f"pass either recorder or on_record{known}")
    check_options(function, on_close, transform, rate, processes, timeout, name)
    check_start_method(start_method)
    selection = WatchSelection().updated(what, include, exclude)
    watching_ranks = selected_ranks(ranks)
    waiting = _MAX_WAITING if rate is None else int(min(max(_MIN_WAITING, 2 * rate), _MAX_WAITING))
    with _lock:
        name = _free_name() if name is None else name
        if name in _running:
            raise ValueError(
                f"a watcher named {name!r} is already running; pass another name, or attach "
                "targets to it with tap.watch(targets, name=...) alone"
            )
        tasks = [
            Task(
                name if processes == 1 else f"{name} {number}", function, on_close, _ENTRY_POINTS,
                start_method, timeout, waiting, buffer_size() // processes, restart, daemon,
            )
            for number in range(processes)
        ]  # fmt: skip
        pickled(tasks[0])  # raises now if it cannot be sent, even if the worker starts later
        workers = WorkerPool(tasks)
        observer = RateLimitedObserver(
            name, selection, rate=rate, ranks=watching_ranks, transform=transform, keep=keep,
            queue_of=workers.queue,
        )  # fmt: skip
        watcher = Watcher(name, observer, workers, functools.partial(_remove, name))
        watcher.enabled = enabled
        _running[name] = watcher
    try:
        _register_exit()
        if targets is not None:
            watcher.attach(targets)
        watcher.start()
    except BaseException:
        watcher.close(1.0)
        raise
    return watcher


def _check_not_importing_main() -> None:
    """Raise in a process that multiprocessing starts while it imports the main module."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and getattr(process.current_process(), "_inheriting", False):
        raise TensortapError(
            "tap.watch was called while multiprocessing imports the main module in a new process: "
            "put the training under if __name__ == '__main__'"
        )


def watcher(name: str | None = None) -> Watcher:
    """Return the running watcher, from anywhere in the program; by `name` if there are several."""
    running = dict(_running)
    if not running:
        raise NotFound("no watcher is running: call tap.watch(...) first")
    if name is None and len(running) == 1:
        return next(iter(running.values()))
    if name is not None and name in running:
        return running[name]
    problem = "several watchers are running" if name is None else f"no watcher {name!r}"
    raise NotFound(f"{problem}; pass one of the names {', '.join(map(repr, running))}")


def _free_name() -> str:
    number = 1
    while (name := "watch" if number == 1 else f"watch-{number}") in _running:
        number += 1
    return name


_running: dict[str, Watcher] = {}
_inherited: list[Watcher] = []
_lock = threading.Lock()
_registered = False


def _remove(name: str) -> None:
    with _lock:
        _running.pop(name, None)


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
            one.close()
        except Exception:
            log.exception("tensortap: the watcher %r could not be closed", one.name)


def _after_fork() -> None:
    # the workers belong to the parent: kept, not closed, so that sockets and threads stay untouched
    global _lock, _registered
    for one in _running.values():
        one.stop()
        _inherited.append(one)
    _running.clear()
    _lock, _registered = threading.Lock(), False


os.register_at_fork(after_in_child=_after_fork)
