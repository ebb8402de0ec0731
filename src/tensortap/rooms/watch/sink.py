"""The sink that sends records to a worker process, which it starts, supervises and ends.

Records travel as they do to a live session: through a queue, the arena and a socket. The server
is a process of our own.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import socket
import threading
import time
from typing import NamedTuple

from tensortap.capture.ledger import DISCONNECTED, ERROR, OVER_BUDGET, TOO_LARGE, Entry, Ledger
from tensortap.capture.sink import Sink, Wake
from tensortap.core.buffers import Pool
from tensortap.core.errors import TensortapError
from tensortap.core.limits import available_memory, shortage, total_memory
from tensortap.core.settings import flag
from tensortap.live.address import Address
from tensortap.live.sink import LiveSink
from tensortap.rooms.watch.launch import Task, launch
from tensortap.rooms.watch.worker_process import (
    TIME_UP,
    Done,
    End,
    Fault,
    MessageReader,
    Ready,
    WorkerCounts,
    send,
)

log = logging.getLogger("tensortap")

_CHECKED = 0.1  # seconds between two looks at the memory that is left
_ENDS: set[socket.socket] = set()  # our ends of all sockets to workers


class _Exit(NamedTuple):
    """The exit code and the last words of a worker process."""

    code: int | None
    done: Done | None  # its last message, if it left in order
    words: str  # what it printed when it crashed


class WorkerSink(Sink):
    """Starts one worker process, sends it records, and notices when it ends."""

    def __init__(self, task: Task, pool: Pool) -> None:
        # in a small container, what waits here and in the worker takes a quarter of what is left
        self.budget = min(task.budget, available_memory() // 8)
        self._task = task = dataclasses.replace(task, budget=self.budget)
        self.ledger = Ledger()
        self.counts = WorkerCounts()  # as the worker last reported
        self.alive = True
        self.died = False
        self.closing = False
        self.lost = 0  # records that the worker had not processed when it died or ran out of time
        self._handed = 0  # records that the queue has handed over
        self._unsent = 0  # records that were still on their way to a worker that died
        self._changed = threading.Condition()
        self._killed = False  # by us, because it hung
        self._short = False  # by us, because memory is short
        self._checked = 0.0
        self._exit: _Exit | None = None
        self._detached = False  # the queue has closed: the supervisor handles the exit itself
        self._wake: Wake | None = None
        if lacking := shortage():
            raise TensortapError(f"cannot start worker {task.name!r}: {lacking}")
        key = secrets.token_bytes(32)
        self._line, theirs = socket.socketpair()
        _ENDS.add(self._line)
        try:
            self._process = launch(task, key, theirs)
        except BaseException:
            _hang_up(self._line)
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.let_go = self._process.let_go
        address = Address("127.0.0.1", 0)  # the worker tells its port when it listens
        arena = not flag("TENSORTAP_NO_ARENA")
        self._live = LiveSink(address, pool, self.ledger, arena=arena, key=key)
        threading.Thread(target=self._supervise, name="tensortap-worker", daemon=True).start()

    # -- what the queue calls -------------------------------------------------------------

    @property
    def accepting(self) -> bool:
        return not self.closing and not self.died

    @property
    def unreachable(self) -> bool:
        return not self.alive

    @property
    def pending(self) -> int:
        return self._live.pending

    def room(self) -> int:
        return self._live.room() if self.alive else 0

    def send(self, entries: list[Entry]) -> None:
        self._handed += len(entries)
        self._live.send(entries)

    def wait(self, wake: Wake, timeout: float) -> None:
        self._wake = wake
        if self._exit is not None:
            self._handle_exit()
        if self.alive:
            self._end_if_memory_is_short()
            self._live.wait(wake, timeout)
        else:
            wake.wait(timeout)

    def give_up(self) -> list[Entry]:
        entries = self._live.give_up()
        self._unsent += len(entries)
        return entries

    def close(self) -> None:
        if self.alive:
            self._live.close()
        self._detached = True
        self._handle_exit()

    # -- counts ---------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Records that were handed over and are not processed or dropped."""
        reasons, counts = self.ledger.reasons(), self.counts
        arrived = self._handed - self._unsent - reasons[TOO_LARGE] - reasons[ERROR]
        done = counts.processed + counts.errors + counts.dropped
        return max(0, arrived - done - self.lost)

    def wait_until_processed(self, timeout: float) -> bool:
        """Wait until no record is outstanding; return False if time ran out or some were lost."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.outstanding, timeout) and not self.lost

    def reasons(self) -> dict[str, int]:
        """Return how many records were dropped, here or in the worker, by reason."""
        reasons = self.ledger.reasons()
        reasons[OVER_BUDGET] += self.counts.dropped
        reasons[ERROR] += self.counts.errors
        reasons[DISCONNECTED] += self.lost
        return reasons

    # -- the process ----------------------------------------------------------------------

    def _supervise(self) -> None:
        """Read the worker's messages until it ends; the queue's thread handles the exit."""
        reader = MessageReader(self._line)
        done = None
        while not reader.ended:
            for message in reader.read():
                if isinstance(message, Ready):
                    self._live.address = Address("127.0.0.1", message.port)
                    self._wake_queue()
                elif isinstance(message, Fault):
                    log.warning(
                        "tensortap: the function of worker %r raised for %r; it continues, and "
                        "further errors like this one are only counted:\n%s",
                        self._task.name, message.name, message.text.rstrip(),
                    )  # fmt: skip
                elif isinstance(message, WorkerCounts):
                    with self._changed:
                        self.counts = message
                        self._changed.notify_all()
                elif isinstance(message, Done):
                    done = message
        code = self._process.wait(self._task.timeout + 5.0)
        if code is None:  # it has closed the socket, but does not end
            self.kill()
            code = self._process.wait(5.0)
        _hang_up(self._line)
        self._exit = _Exit(code, done, reader.crash_text)
        if self._detached:
            self._handle_exit()
        else:
            self._wake_queue()

    def _end_if_memory_is_short(self) -> None:
        """Kill the worker before the kernel looks for a process to kill."""
        now = time.monotonic()
        if now - self._checked > _CHECKED and not self._short:
            self._checked = now
            self._short = not memory_left()
            if self._short:
                self._process.kill()

    def _wake_queue(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _handle_exit(self) -> None:
        """Count what was lost; log it unless the worker left in order."""
        with self._changed:  # the queue's thread and the supervisor may both find it
            ended, self._exit = self._exit, None
        if ended is None:
            return
        code, done, words = ended
        if not self._detached:
            self._live.close()
        self.ledger.drop(self.give_up(), DISCONNECTED)
        if done is not None:
            self.counts, words = done.counts, done.error or words
        in_order = done is not None or code == TIME_UP or self._killed
        lost = self.outstanding
        if words or not self.closing or not in_order:
            self.died = True
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            if self._short:
                how = "it was killed, because memory is short"
            then = "training continues without it"
            if self.closing:
                then = f"{lost} records were not processed"
            log.error(
                "tensortap: worker %r died (%s); %s%s",
                self._task.name, how, then, f":\n{words.rstrip()}" if words else "",
            )  # fmt: skip
        with self._changed:
            self.lost += lost
            self.alive = False
            self._changed.notify_all()

    def end(self, timeout: float) -> None:
        """Tell the worker to finish within `timeout` seconds."""
        send(self._line, End(max(0.1, timeout)))

    def wait_for_exit(self, timeout: float) -> bool:
        """Wait until the worker has ended; return False if time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.alive, timeout)

    def kill(self) -> None:
        """Kill the worker, because it hangs."""
        self._killed = True
        self._process.kill()


def needed_memory(recorder: object) -> int:
    """Return the bytes that a worker takes: the interpreter, NumPy, records on their way.

    A recorder that needs more has an attribute `needed_memory`.
    """
    needed = getattr(recorder, "needed_memory", 0)
    return max(96 << 20, needed) if isinstance(needed, int) else 96 << 20


def memory_left(nbytes: int = 0) -> bool:
    """Return whether training keeps a reserve of memory beside `nbytes` for a worker."""
    return available_memory() - nbytes >= min(128 << 20, total_memory() // 20)


def _hang_up(line: socket.socket) -> None:
    _ENDS.discard(line)
    line.close()


def _close_inherited() -> None:
    """Close our ends in a forked child: a worker notices by them that the program has ended."""
    for line in list(_ENDS):
        _hang_up(line)


os.register_at_fork(after_in_child=_close_inherited)
