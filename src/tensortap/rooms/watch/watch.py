"""`watch`: run your own code on live tensors, in another process; `list_probes`: on which."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from tensortap.capture.pipeline import at_exit, pipeline
from tensortap.core.arguments import (
    check_callable,
    check_count,
    check_positive,
    check_text,
)
from tensortap.core.errors import NotFound
from tensortap.core.record import Record
from tensortap.core.settings import buffer_size
from tensortap.rooms.track.options import NamePattern
from tensortap.rooms.watch.launch import Task, with_start_method
from tensortap.rooms.watch.watch_observer import (
    ROOM,
    Probe,
    RateLimitedObserver,
    Transform,
    WatchSelection,
)
from tensortap.rooms.watch.watcher import Watcher
from tensortap.values.registry import parts

log = logging.getLogger("tensortap")

_RATE = 20.0  # records per second of one name
_MIN_WAITING = 32  # records of one name that may wait in a worker; or two seconds' worth, if more
_MAX_WAITING = 1024


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
    """
    function = recorder if on_record is None else on_record
    if function is None or (recorder is not None and on_record is not None):
        raise TypeError("pass either recorder or on_record")
    check_count("every", every)
    per_second = _rate(rate, every)
    _check_options(function, on_close, per_second, timeout, name)
    selection = WatchSelection().updated(
        kind=kind, include=include, exclude=exclude, transform=transform
    )
    watching_ranks = _selected_ranks(rank)
    waiting = _MAX_WAITING
    if per_second is not None:
        waiting = int(min(max(_MIN_WAITING, 2 * per_second), _MAX_WAITING))
    with _lock:
        name = _unused_name(name)
        task = Task(name, function, on_close, "", timeout, waiting, buffer_size(), daemon)
        # raises now if it cannot be sent, even if the worker starts later
        task = with_start_method(task, start_method)
        observer = RateLimitedObserver(
            name, selection, every=every, rate=per_second, ranks=watching_ranks
        )
        watcher = Watcher(name, observer, task, functools.partial(_remove, name))
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


def _rate(rate: Any, every: int) -> float | None:
    """Return the limit of records per second; by default, a choice of calls needs none."""
    if isinstance(rate, str) and rate == "auto":
        return _RATE if every == 1 else None
    found: float | None = rate
    return found


def _check_options(function: Any, on_close: Any, rate: Any, timeout: Any, name: Any) -> None:
    check_callable("on_record", function)
    if on_close is not None:
        check_callable("on_close", on_close)
    if isinstance(function, type):
        made = f"{function.__name__}(...)"
        raise TypeError(f"on_record must be a function or an object, got a class; pass {made}")
    if rate is not None:
        check_positive("rate", rate)
    check_positive("timeout", timeout)
    if name is not None:
        check_text("name", name)


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


def _unused_name(name: str | None) -> str:
    """Return the name that was given, or a free one; raise if a watcher has that name."""
    if name is not None and name in _running:
        raise ValueError(
            f"a watcher named {name!r} is already running; pass another name, or attach targets "
            f"to it with tap.watcher({name!r}).attach(...)"
        )
    numbered = ("watch" if n == 1 else f"watch-{n}" for n in itertools.count(1))
    return name or next(each for each in numbered if each not in _running)


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
            one.close_at_exit()
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


class Probes(tuple[Probe, ...]):
    """The probes that `list_probes` has found; printed, they are a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("name", "type", "shape", "dtype", "output", "gradient", "in place", "")
        ]
        for p in self:
            shape = "×".join(map(str, p.shape)) or "scalar"
            marks = ("yes" if mark else "no" for mark in (p.output, p.gradient, p.in_place))
            rows.append((p.name, p.type, shape if p.dtype else "", p.dtype, *marks, p.note))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def list_probes(model: Any, *inputs: Any, **named: Any) -> Probes:
    """Return what of a model can be watched: ``print(tap.rooms.watch.list_probes(model, batch))``.

    Runs the model forward and backward once, on copies of the inputs. Gradients, buffers, random
    numbers and the mode of the model are afterwards as they were.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(inplace=True))
    >>> [(p.name, p.shape, p.gradient, p.in_place) for p in list_probes(model, torch.ones(1, 2))][1]
    ('0', (1, 3), True, True)
    """
    enabled = pipeline.enabled
    pipeline.switch(False)  # nobody tracks or watches this pass
    try:
        for part in parts(ROOM):
            probes = part.find_probes(model, inputs, named)
            if probes is not None:
                return Probes(probes)
    finally:
        pipeline.switch(enabled)
    raise TypeError(f"list_probes needs a torch.nn.Module, got {model!r:.100}")
