"""`init`: a run on disk for everything that is captured from here on."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from pathlib import Path
from typing import Any

from tensortap import ranks
from tensortap.errors import NotFound
from tensortap.pipeline.exit import at_exit
from tensortap.pipeline.pipeline import pipeline
from tensortap.pipeline.queue import Queue
from tensortap.pipeline.receipt import Receipt
from tensortap.runs.folders import end_run, job_name, shared_run
from tensortap.runs.layout import receipt_file, write_json
from tensortap.settings import buffer_size
from tensortap.sinks.store import StoreSink
from tensortap.wire.worker import leave_main

log = logging.getLogger("tensortap")

_END = 60.0  # seconds that the end of a run may take: what was captured is to be kept


class OpenRun:
    """The run that this process writes."""

    def __init__(self, path: Path, rank: int, world_size: int, durable: bool) -> None:
        self.path = path
        self.rank = rank
        self.world_size = world_size
        sink = StoreSink(path, rank, durable=durable, ledger=pipeline.ledger)
        self.queue = Queue(sink, budget=buffer_size(), overflow="newest", name="store")
        self.next_step = 0  # where the next tracker goes on
        self._before = pipeline.receipt()
        self.keeper: Any = None
        if rank == 0:
            from tensortap.provenance.collect import Keeper

            self.keeper = Keeper(path)
            self.keeper.update()
        pipeline.attach(self.queue)

    def finish(self) -> None:
        """Write what is under way and say in the run that it has ended, and what it cost."""
        receipt = pipeline.receipt()
        pipeline.detach(self.queue)
        try:
            self.queue.close(_END)
            self._keep(receipt)
            if self.keeper is not None:
                self.keeper.close()
            if self.rank == 0:
                end_run(self.path)
        finally:
            pipeline.restart()

    def _keep(self, receipt: Receipt) -> None:
        cost = dataclasses.asdict(receipt.since(self._before))
        try:
            write_json(receipt_file(self.path, self.rank), cost)
        except OSError as error:  # a full disk, or a folder that was removed
            log.warning("tensortap: the receipt of %s was not kept: %s", self.path, error)


_open: OpenRun | None = None
_registered = False
_lock = threading.Lock()


def init(folder: str | Path = "runs", *, durable: bool = False) -> Path:
    """Start a run below `folder`, named after the time; everything captured is kept there.

    All ranks of a job share one folder. `durable` makes what a flush has confirmed survive a
    power cut as well. A run that was open is ended first. Returns the folder of the run.
    """
    global _open, _registered
    leave_main()
    with _lock:
        _finish()
        rank, world_size = ranks.rank_and_world_size()
        path = shared_run(Path(folder), rank, world_size, job_name())
        _open = OpenRun(path, rank, world_size, durable)
        if not _registered:
            _registered = True
            at_exit(_finish_at_exit, priority=15)
        pipeline.clock.let_go()
        return path


def finish() -> None:
    """End the run: it is complete when this returns. Steps begin anew."""
    with _lock:
        _finish()


def _finish() -> None:
    global _open
    if _open is None:
        return
    try:
        _open.finish()
    except Exception:
        _open = None  # a run that cannot end does not bar the next one
        raise
    _open = None


def _finish_at_exit() -> None:
    pipeline.settle()
    finish()


def opened() -> OpenRun | None:
    """The run that is open, if one is."""
    return _open


def current() -> OpenRun:
    """The run that is open."""
    if _open is None:
        raise NotFound("no run is open: call tap.init('runs') first")
    return _open


def update_metadata() -> None:
    """Look again at packages, git and the environment; what has changed is written anew."""
    run = current()
    if run.keeper is not None:
        run.keeper.update(force=True)


def _forget() -> None:
    # a forked child does not write into the files of its parent
    global _open, _lock, _registered
    _open = None
    _registered = False
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
