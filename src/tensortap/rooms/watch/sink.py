"""The sink that sends records to a worker process, which it starts, supervises and ends.

Records travel as they do to a live session: through a queue, the arena and a socket. The server
is a process of our own.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import socket
import threading
import time
from typing import NamedTuple

from tensortap.capture.ledger import DISCONNECTED, ERROR, OVER_BUDGET, TOO_LARGE, Entry, Ledger
from tensortap.capture.queue import Queue
from tensortap.capture.sink import Sink, Wake
from tensortap.core.buffers import Pool
from tensortap.core.settings import flag
from tensortap.live.address import Address
from tensortap.live.sink import LiveSink
from tensortap.rooms.watch.launch import Process, Task, launch, pickled
from tensortap.rooms.watch.messages import (
    TIME_UP,
    UNASKED,
    Answer,
    Ask,
    Done,
    End,
    Fault,
    MessageReader,
    Ready,
    WorkerCounts,
    send,
)

log = logging.getLogger("tensortap")

PATIENCE = 5.0  # seconds of waiting at the end before a message says for what
_ENDS: set[socket.socket] = set()  # our ends of all sockets to workers


class _Exit(NamedTuple):
    """The exit code and the last words of a worker process."""

    code: int | None
    done: Done | None  # its last message, if it left in order
    words: str  # what it printed when it crashed


class WorkerSink(Sink):
    """Starts one worker process, sends it records, and notices when it ends."""

    def __init__(self, task: Task, pool: Pool) -> None:
        self.task = task
        self.ledger = Ledger()
        self.counts = WorkerCounts()  # as the worker last reported
        self.alive = True
        self.died = False
        self.closing = False
        self.handed = 0  # records that the queue has handed over
        self.lost = 0  # records that the worker had not processed when it died or ran out of time
        self._unsent = 0  # records that were still on their way to a worker that died
        self._changed = threading.Condition()
        self._answered: set[int] = set()
        self._numbers = itertools.count()
        self._killed = False  # by us, because it hung
        self._exit: _Exit | None = None
        self._detached = False  # the queue has closed: the supervisor handles the exit itself
        self._wake: Wake | None = None
        key = secrets.token_bytes(32)
        self._line, theirs = socket.socketpair()
        _ENDS.add(self._line)
        try:
            self._process = launch(task, pickled(task), key, theirs)
        except BaseException:
            _hang_up(self._line)
            raise
        finally:
            theirs.close()
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
        self.handed += len(entries)
        self._live.send(entries)

    def wait(self, wake: Wake, timeout: float) -> None:
        self._wake = wake
        if self._exit is not None:
            self._handle_exit()
        if self.alive:
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
        arrived = self.handed - self._unsent - reasons[TOO_LARGE] - reasons[ERROR]
        done = counts.processed + counts.errors + counts.dropped
        return max(0, arrived - done - self.lost)

    def reasons(self) -> dict[str, int]:
        """Return how many records were dropped, here or in the worker, by reason."""
        reasons = self.ledger.reasons()
        reasons[OVER_BUDGET] += self.counts.dropped
        reasons[ERROR] += self.counts.errors
        reasons[DISCONNECTED] += self.lost
        return reasons

    # -- the process ----------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The process id of the worker."""
        return self._process.pid

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
                        self.task.name, message.name, message.text.rstrip(),
                    )  # fmt: skip
                elif isinstance(message, Answer):
                    with self._changed:
                        self.counts = message.counts
                        if message.number != UNASKED:
                            self._answered.add(message.number)
                        self._changed.notify_all()
                elif isinstance(message, Done):
                    done = message
        process: Process = self._process
        code = process.wait(self.task.timeout + 5.0)
        if code is None:  # it has closed the socket, but does not end
            self._killed = True
            process.kill()
            code = process.wait(5.0)
        _hang_up(self._line)
        self._exit = _Exit(code, done, reader.crash_text)
        if self._detached:
            self._handle_exit()
        else:
            self._wake_queue()

    def _wake_queue(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _handle_exit(self) -> None:
        with self._changed:  # the queue's thread and the supervisor may both find it
            ended, self._exit = self._exit, None
        if ended is not None:
            self._after_exit(ended)

    def _after_exit(self, ended: _Exit) -> None:
        """Count what was lost; log it unless the worker left in order."""
        if not self._detached:
            self._live.close()
        self.ledger.drop(self.give_up(), DISCONNECTED)
        if ended.done is not None:
            self.counts = ended.done.counts
        words = (ended.done.error if ended.done is not None else "") or ended.words
        in_order = ended.done is not None or ended.code == TIME_UP or self._killed
        lost = self.outstanding
        if words or not self.closing or not in_order:
            self.died = True
            code = ended.code
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            then = "training continues without it"
            if self.closing:
                then = f"{lost} records were not processed"
            log.error(
                "tensortap: worker %r died (%s); %s%s",
                self.task.name, how, then, f":\n{words.rstrip()}" if words else "",
            )  # fmt: skip
        self.lost += lost
        with self._changed:
            self.alive = False
            self._changed.notify_all()

    # -- questions to the worker ----------------------------------------------------------

    def ask(self, timeout: float, *, drained: bool = False) -> bool:
        """Have the worker report its counts; `drained`: after it has processed everything."""
        number, deadline = next(self._numbers), time.monotonic() + timeout
        if not self.alive or not send(self._line, Ask(number, drained)):
            return False
        with self._changed:
            while number not in self._answered and self.alive:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            answered = number in self._answered
            self._answered.discard(number)
            return answered

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

    def let_go(self) -> None:
        """Let the program end before the worker."""
        self._process.let_go()


class Worker:
    """A worker process and the queue to it."""

    def __init__(self, task: Task, pool: Pool) -> None:
        self.task = task
        self.sink = WorkerSink(task, pool)
        self.queue = Queue(self.sink, budget=task.budget, name=f"worker-{task.name}")
        self._flushed = 0  # records handed over when all were last known to be processed

    @property
    def waiting(self) -> int:
        """Number of records that are queued, on their way, or in the worker and not processed."""
        return self.queue.waiting + self.sink.outstanding

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything so far has been processed; return False if time ran out."""
        deadline = time.monotonic() + (self.task.timeout if timeout is None else timeout)
        if not self.queue.flush(max(0.0, deadline - time.monotonic())):
            return False
        handed = self.sink.handed
        if handed != self._flushed:
            if not self.sink.ask(deadline - time.monotonic(), drained=True):
                return False
            self._flushed = handed
        return True

    def close(self, timeout: float | None = None, *, wait: bool = True) -> None:
        """Let the worker process everything, close its files and end, within `timeout` seconds.

        Without `wait`, it does so after the program has ended.
        """
        sink = self.sink
        if sink.closing:
            return
        sink.closing = True
        deadline = time.monotonic() + (self.task.timeout if timeout is None else timeout)
        try:
            if sink.alive:
                self._finish(deadline, wait)
        finally:
            self.queue.close(0.0)
        if sink.lost and not sink.died:
            log.warning(
                "tensortap: worker %r did not process %d records before its time was up; "
                "increase timeout=", self.task.name, sink.lost,
            )  # fmt: skip

    def _finish(self, deadline: float, wait: bool) -> None:
        sink = self.sink
        warn_at = time.monotonic() + PATIENCE
        try:
            # leave the worker some of the time, to process what it has and to close its files
            until = time.monotonic() + (deadline - time.monotonic()) * 0.75
            while sink.alive and (left := until - time.monotonic()) > 0:
                if self.queue.flush(min(left, 0.5)):
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
            log.warning("tensortap: worker %r hung and was killed", self.task.name)
            sink.kill()
            sink.wait_for_exit(5.0)

    def _warn(self, warn_at: float, deadline: float) -> float:
        """Log once why the program does not end; return when to log next."""
        if time.monotonic() < warn_at or not self.sink.alive:
            return warn_at
        log.warning(
            "tensortap: worker %r still has %d records to process; waiting %.0f more seconds "
            "(timeout=)", self.task.name, self.waiting, deadline - time.monotonic(),
        )  # fmt: skip
        return math.inf


def _hang_up(line: socket.socket) -> None:
    _ENDS.discard(line)
    line.close()


def _close_inherited() -> None:
    """Close our ends in a forked child: a worker notices by them that the program has ended."""
    for line in list(_ENDS):
        _hang_up(line)


os.register_at_fork(after_in_child=_close_inherited)
