"""Write what a black box keeps into the run, in a thread of its own: training does not wait."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tensortap.arguments import check_count
from tensortap.frameworks.replaying import KeptBatch, KeptState, StorableTraining
from tensortap.frameworks.snapshot import borrow
from tensortap.limits import format_size, parse_size
from tensortap.pipeline.pipeline import pipeline
from tensortap.runs.replayable import ReplayableWriter
from tensortap.settings import buffer_size

log = logging.getLogger("tensortap")

_DISK = "10 GiB"


class BoxOptions(NamedTuple):
    """Options of ``init(blackbox=…)``: steps between snapshots, and bytes on disk."""

    every: int = 1
    disk: int = parse_size(_DISK)

    @classmethod
    def of(cls, given: bool | Mapping[str, Any]) -> BoxOptions | None:
        """Return checked options; None if nothing is to be written."""
        if isinstance(given, bool):
            return cls() if given else None
        unknown = set(given) - {"every", "disk"}
        if unknown:
            raise ValueError(
                f"blackbox takes 'every' and 'disk', got {', '.join(map(repr, sorted(unknown)))}"
            )
        every = given.get("every", 1)
        check_count("blackbox['every']", every)
        return cls(every, parse_size(given.get("disk", _DISK), "blackbox['disk']"))


class BoxWriter:
    """Takes snapshots and steps from the training thread and writes them into the run.

    Steps that wait take at most as much memory as a queue (TENSORTAP_BUFFER). Beyond that steps are
    dropped, up to the next snapshot.
    """

    def __init__(
        self, writer: ReplayableWriter, training: StorableTraining, options: BoxOptions, owner: int
    ) -> None:
        self.owner = owner  # id of the black box
        self._unsent = self._lost = 0  # steps dropped by the training thread, and by the writer
        self._writer = writer
        self._training = training
        self._every = options.every
        self._budget = buffer_size()
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._pending = 0  # bytes of batches
        self._snapshots = 0  # that wait
        self._intact = False  # whether steps continue from a snapshot
        self._since = 0  # steps since the last snapshot
        self._changed = threading.Condition()
        self._working = False
        self._closed = False
        self._reported = False
        self._thread = threading.Thread(target=self._run, name="tensortap-blackbox", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of steps that were not written, and cannot be replayed."""
        return self._unsent + self._lost

    @property
    def evicted(self) -> int:
        """Number of steps that were evicted to stay below the limit."""
        return self._writer.evicted

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self._writer.nbytes

    # -- in the training thread -------------------------------------------------------------------

    def snapshot(self, step: int, kept: KeptState, continues: bool) -> None:
        """Take a snapshot, unless one still waits, or steps go on from one that is recent."""
        self._intact = self._intact and continues
        if self._snapshots or (self._intact and self._since < self._every):
            return
        self._intact, self._since = True, 0
        self._put(lambda: self._write_snapshot(step, kept), snapshots=1)

    def step(self, number: int, batch: KeptBatch, moment: Any) -> None:
        """Take a step that begins."""
        if self._intact and self._pending + batch.nbytes > self._budget:
            self._intact = False
        if not self._intact:
            self._unsent += 1
            return
        self._since += 1
        self._put(lambda: self._write_step(number, batch, moment), nbytes=batch.nbytes)

    def result(self, digest: bytes) -> None:
        """Take the digest of what the last step returned."""
        if self._intact:
            self._put(lambda: self._writer.end_step(digest))

    def _put(self, work: Callable[[], None], snapshots: int = 0, nbytes: int = 0) -> None:
        with self._changed:
            self._waiting.append(work)
            self._snapshots += snapshots
            self._pending += nbytes
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until everything is written; return False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._working), timeout)

    def close(self, timeout: float) -> None:
        """Write the rest and end the thread."""
        deadline = time.monotonic() + timeout
        done = self.flush(timeout)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not done:
            log.warning("tensortap: the last steps of the black box were not written in time")
        if self.dropped:
            log.warning(
                "tensortap: the black box dropped %d steps, which cannot be replayed", self.dropped
            )

    # -- in the thread of the writer --------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    break
                work = self._waiting.popleft()
                self._working = True
            try:
                work()
            except Exception as error:  # a full disk, or an object that cannot be stored
                self._give_up(error)
        self._writer.end()

    def _write_snapshot(self, step: int, kept: KeptState) -> None:
        try:
            value = borrow(self._training.plain_state(kept))
            if not self._writer.begin(step, value, self.dropped):
                limit = format_size(self._writer.limit)
                self._give_up(f"a snapshot takes more than the limit of {limit} on disk")
        finally:
            with self._changed:
                self._snapshots -= 1

    def _write_step(self, number: int, batch: KeptBatch, moment: Any) -> None:
        try:
            value = borrow(self._training.plain_step(batch, moment))
            if not self._writer.add_step(number, value):
                self._lose()
        finally:
            with self._changed:
                self._pending -= batch.nbytes

    def _lose(self) -> None:
        self._lost += 1
        self._intact = False
        self._writer.end()

    def _give_up(self, error: Exception | str) -> None:
        self._lose()
        if isinstance(error, Exception) and not isinstance(error, OSError):
            pipeline.fault("blackbox", error, "was not written")
        elif not self._reported:
            self._reported = True
            log.warning("tensortap: the black box cannot write into the run: %s", error)
