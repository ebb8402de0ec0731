"""`init` and `finish`: the run on disk that gets everything captured in between."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tensortap.capture.ledger import Receipt
from tensortap.capture.pipeline import at_exit, pipeline
from tensortap.capture.queue import Queue
from tensortap.core import ranks
from tensortap.core.arguments import checked
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.limits import shortage
from tensortap.core.rooms import offers
from tensortap.core.settings import buffer_size
from tensortap.runs.folders import end_run, job_name, shared_run, update_info
from tensortap.runs.layout import receipt_file, write_json
from tensortap.runs.sink import StoreSink

log = logging.getLogger("tensortap")

_END = 30.0  # seconds that writing the rest of a run may take; 2 if the disk is full
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EAGAIN)


class OpenRun:
    """The run that this process writes."""

    def __init__(self, path: Path, rank: int, world_size: int, durable: bool) -> None:
        self.path = path
        self.rank = rank
        self.world_size = world_size
        self.sink = StoreSink(path, rank, durable=durable, ledger=pipeline.ledger)
        self.queue = Queue(self.sink, budget=buffer_size(), overflow="newest", name="store")
        self.next_step = 0  # first step of the next tracker
        self._before = pipeline.receipt()
        self.keepers: list[Any] = []  # what rooms write into the folder: update, update_now, close
        for keep in offers("run.opened"):
            try:
                keeper = keep(self)
            except OSError as error:
                log.warning("tensortap: cannot write into %s: %s", path, error)
            else:
                self.keepers += [] if keeper is None else [keeper]
        self._queues = [self.queue]
        for make in offers("sinks"):  # of other packages: they get every record, too
            try:
                other = make(self)
            except Exception as error:  # somebody else's code must not prevent the run
                log.warning("tensortap: a sink of another package cannot be used: %s", error)
                continue
            if other is not None:
                other.ledger = pipeline.ledger  # what it drops is in the receipt
                queue = Queue(other, budget=buffer_size(), overflow="newest", name="sink")
                self._queues.append(queue)
        for queue in self._queues:
            pipeline.attach(queue)

    def finish(self, crashed: str) -> None:
        """Write the rest and the receipt, and mark the run as ended, or as crashed."""
        for queue in self._queues:
            pipeline.detach(queue)
        try:
            for queue in self._queues:
                queue.close(_END)
            if self.sink.is_intact():
                self._write_receipt(pipeline.receipt())  # now: all drops are counted
            for keeper in self.keepers:
                keeper.close()
            if self.rank == 0 and self.sink.is_intact():
                end_run(self.path, crashed)
        finally:
            pipeline.restart()

    def _write_receipt(self, receipt: Receipt) -> None:
        cost = msgspec.to_builtins(receipt.since(self._before))
        try:
            write_json(receipt_file(self.path, self.rank), cost)
        except OSError as error:  # a full disk, or a folder that was removed
            log.warning("tensortap: cannot write the receipt of %s: %s", self.path, error)


_open: OpenRun | None = None
_full = ""  # why `init` could not open a run, such as a full disk
_registered = False
_lock = threading.Lock()


@checked
def init(
    to: str | Path = "runs",
    *,
    name: str = "",
    config: Mapping[str, Any] | None = None,
    notes: str = "",
    durable: bool = False,
) -> Path:
    """Start a run in a new folder below `to`; it keeps everything captured from now on.

    All ranks of a job share the folder, which is named after the time. The page shows `name` and
    `notes`, and a comparison of two runs begins with what differs in their `config`. With
    `durable`, what a flush has confirmed survives even a power failure. An open run is finished
    first. Returns the folder of the run. If the disk is full, or few threads or file descriptors
    are left, that is logged, and training continues without a run.
    """
    described = {"name": name, "notes": notes, "config": _as_json(config or {})}
    global _open, _registered, _full
    path = Path(to).absolute()  # the program may change its working directory
    with _lock:
        _finish()
        rank, world_size = ranks.rank_and_world_size()
        _full = ""
        try:
            if lacking := shortage():
                raise OSError(errno.EAGAIN, lacking)
            path = shared_run(path, rank, world_size, job_name())
            if rank == 0 and any(described.values()):
                update_info(path, **described)
            _open = OpenRun(path, rank, world_size, durable)
        except (OSError, TensortapError) as error:
            cause = error.__cause__ or error
            if getattr(cause, "errno", None) not in _NO_ROOM or pipeline.strict:
                raise
            _full = f"{path}: {cause}"
            log.warning("tensortap: cannot write a run in %s; training continues without", _full)
        if not _registered:
            _registered = True
            at_exit(finish_at_exit, priority=15)
        pipeline.clock.let_go()
        return path


def _as_json(config: Mapping[str, Any]) -> Any:
    """Return a config with texts in place of what JSON has no form for."""
    content = json.loads(json.dumps(dict(config), default=str, skipkeys=True))
    if len(json.dumps(content)) > 1 << 18:
        raise ValueError("config must take at most 256 KiB as JSON; pass what differs between runs")
    return content


def join(path: Path) -> None:
    """Write into a run that another process has created, as the rank of this process."""
    global _open
    with _lock:
        _finish()
        _open = OpenRun(path, *ranks.rank_and_world_size(), durable=False)


def finish() -> None:
    """Finish the run: it is complete when this returns. Steps start at 0 again."""
    _settle_and_finish("")


def finish_at_exit() -> None:
    """Finish the run at the end of the program; note the exception that ended it, if one did."""
    error = getattr(sys, "last_type", None)
    # in an interactive session, the exception was that of some earlier line
    if error is None or issubclass(error, KeyboardInterrupt) or hasattr(sys, "ps1"):
        _settle_and_finish("")
    else:
        _settle_and_finish(error.__name__)


def _settle_and_finish(crashed: str) -> None:
    pipeline.settle()  # compiled functions may still be running, with values to capture
    with _lock:
        _finish(crashed)


def _finish(crashed: str = "") -> None:
    global _open
    if _open is None:
        return
    try:
        _open.finish(crashed)
    except Exception:
        _open = None  # an error must not prevent the next run
        raise
    _open = None


def opened() -> OpenRun | None:
    """Return the open run, or None."""
    return _open


def current() -> OpenRun:
    """Return the open run; raise NotFound if there is none."""
    if _open is None:
        raise NotFound(_full or "no run is open: call tap.init('runs') first")
    return _open


def could_not_open() -> bool:
    """Return whether `init` was called and there was no room for a run."""
    return bool(_full) and _open is None


def update_metadata() -> None:
    """Write what has changed of packages, git state, environment and monkey patches by now.

    Returns when it is written, which takes a second or more.
    """
    for keeper in () if could_not_open() else current().keepers:
        keeper.update_now()


def _after_fork() -> None:
    # a forked child must not write into the files of its parent
    global _open, _lock, _registered
    _open = None
    _registered = False
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
