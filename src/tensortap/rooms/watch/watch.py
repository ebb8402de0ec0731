"""`watch`: run your own code on live tensors, in another process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from tensortap.capture.pipeline import at_exit
from tensortap.core.arguments import check_callable, check_count, check_positive, check_text
from tensortap.core.errors import NotFound
from tensortap.core.record import Record
from tensortap.core.settings import buffer_size
from tensortap.rooms.track.options import NamePattern
from tensortap.rooms.watch.sink import Task, with_start_method
from tensortap.rooms.watch.watch_observer import Transform, WatchSelection
from tensortap.rooms.watch.watcher import Watcher

log = logging.getLogger("tensortap")

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
        rate=rate, ranks=_selected_ranks(options["rank"]), on_closed=_remove,
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


def _remove(closed: Watcher) -> None:
    with _lock:
        _running.pop(closed.name, None)


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
