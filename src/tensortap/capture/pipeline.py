"""The pipeline of this process: turns values into records and hands them to queues."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import structs

from tensortap import values as frameworks
from tensortap.capture import ticket as tickets
from tensortap.capture.fast import FastPath, type_name
from tensortap.capture.ledger import BUSY, DISCONNECTED, ERROR, Ledger, Receipt
from tensortap.capture.queue import Queue, admit, write_to
from tensortap.capture.selection import CallCounter, CallCounters, Clock
from tensortap.capture.ticket import SKIPPED, Ticket
from tensortap.core import ranks
from tensortap.core.buffers import OutOfMemory, Pool
from tensortap.core.busy import Busy, is_busy, is_of_handler
from tensortap.core.history import OVERHEAD
from tensortap.core.probes import CHANGE, ProbeRequest, probes
from tensortap.core.record import Kind, Record, Shard, TensorData, Value
from tensortap.core.settings import flag, memory_limit
from tensortap.stats.columns import RecordColumns
from tensortap.values.adapters import adapter_of
from tensortap.values.protocol import SMALL, Adapter, CompiledRun

log = logging.getLogger("tensortap")

_now = time.perf_counter_ns
_VALUE = Kind.VALUE
_NO_TENSOR = TensorData("", "", (), b"")
EXIT = 2.0  # seconds that the end of the program may wait for what is queued


def at_exit(function: Callable[[], object], *, priority: int) -> None:
    """Run a function when the process ends; in a child of multiprocessing, higher ones first."""
    atexit.register(function)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        # a child of multiprocessing leaves without atexit, and forgets at its start what it had
        # inherited: call this in the process that is to run the function
        from multiprocessing.util import Finalize

        Finalize(None, function, exitpriority=priority)


class Sessions(Protocol):
    """The live sessions that values go to; `tensortap.live.connections` puts itself here."""

    def connect(self) -> bool:
        """Connect to the default session at the first call; return whether anybody listens."""
        ...

    def queues(self, server: str) -> Sequence[Queue]:
        """Return the queues that accept a value for `server` instead of the default session."""
        ...


class Pipeline:
    """Clock, call counters, pool, ledger and queues of one process.

    A forked child gets fresh ones. `on` is whether a value has anywhere to go, as far as is
    known, and `fast` the C fast path for small values, while exactly one queue accepts records.
    """

    sessions: Sessions

    def __init__(self) -> None:
        self.enabled = not flag("TENSORTAP_DISABLE")
        self._inherited: list[Any] = []
        self._reset()
        os.register_at_fork(after_in_child=self._after_fork)

    def _reset(self) -> None:
        self.strict = flag("TENSORTAP_STRICT")
        self.counters = CallCounters()
        self.clock = Clock()
        self.pool = Pool(limit=memory_limit)
        self.ledger = Ledger()
        self.next_seq: Callable[[], int] = itertools.count().__next__  # the order of capture
        self.settlers: list[Callable[[], object]] = []
        self.expecting = False  # whether another queue is attached at the first value
        self.closed = False
        self._attached: dict[Queue, bool] = {}  # whether it gets every record
        self._fast_path: FastPath | None = None
        self._fast_queue: Queue | None = None
        self._lock = threading.RLock()  # a signal handler may refresh while it is refreshed
        self._refreshes = 0
        self._registered = False
        self._errors: set[tuple[str, str]] = set()  # name and class of those that were logged
        self._warned_owner = False
        self._work_out()

    def _after_fork(self) -> None:
        # kept, not closed: sockets and threads of the parent must not be touched here
        self._inherited.append(dict(self.__dict__, _inherited=None))
        tickets.after_fork()
        self._reset()

    # -- queues ---------------------------------------------------------------------------

    @property
    def queues(self) -> tuple[Queue, ...]:
        """The queues that get every record."""
        return tuple([queue for queue, every_record in self._attached.items() if every_record])

    def thread_ns(self) -> int:
        """Return the processor time that the threads of all queues have taken so far."""
        return sum([queue.thread_ns for queue in list(self._attached)])

    def attach(self, queue: Queue, *, every_record: bool = True) -> None:
        """Hand records to this queue; without `every_record` only those addressed to it."""
        if not self._registered:
            self._registered = True
            at_exit(self.close, priority=10)
        self._attached[queue] = every_record or self._attached.get(queue, False)
        queue.on_change = self.refresh
        self.refresh()

    def detach(self, queue: Queue) -> None:
        self._attached.pop(queue, None)
        queue.on_change = None
        self.refresh()

    def refresh(self) -> None:
        """Work out again which queues accept records; it is done when this returns."""
        self._refreshes += 1
        with self._lock:
            seen = None
            while seen != self._refreshes:  # again if a signal handler has come in between
                seen = self._refreshes
                self._work_out()

    def _work_out(self) -> None:
        queues = self.queues if self.enabled and not self.closed else ()
        accepting = self._accepting = tuple([queue for queue in queues if queue.accepting])
        self.on = self.enabled and not self.closed and (bool(accepting) or self.expecting)
        self.count_unheard: Callable[[], int] = (
            self.ledger.count_unheard if self.enabled else itertools.count().__next__
        )
        self.fast: Callable[..., Ticket | None] | None = None
        if len(accepting) == 1 and not self.expecting:
            if accepting[0] is not self._fast_queue:
                self._fast_queue = accepting[0]
                self._fast_path = accepting[0].fast_path(self.next_seq)
            self.fast = self._fast_path.capture if self._fast_path is not None else None

    def switch(self, enabled: bool) -> None:
        self.enabled = enabled
        self.refresh()

    # -- steps ----------------------------------------------------------------------------

    def advance(self, owner: str, step: int | None = None) -> int | None:
        """Advance the step, or set it, if `owner` owns the clock; return the current step."""
        self.settle()
        before = self.clock.step
        if self.clock.advance(owner, step):
            if self.clock.step != before:  # of two trackers, the second one advances nothing
                probes.begin_step(self.clock.step, self._note_change)
        elif not self._warned_owner:
            self._warned_owner = True
            log.warning(
                "tensortap: %s advances the step; calls of %s are ignored", self.clock.owner, owner
            )
        return self.clock.step

    def _note_change(self, request: ProbeRequest, done: str) -> None:
        """Record that a session has changed what is looked at."""
        tags = {name: str(value) for name, value in structs.asdict(request).items() if value}
        tags["done"] = done
        rank, world_size = ranks.rank_and_world_size()
        self.put(Record(
            CHANGE, _VALUE, self.clock.step or 0, 0, self.next_seq(), rank, world_size,
            time.time_ns(), "builtins.str", value=done, tags=tags,
        ))  # fmt: skip

    def restart(self) -> None:
        """Reset steps and calls, so that a new run starts fresh."""
        self.clock.restart()
        for counter in list(self.counters.values()):
            counter.restart()

    # -- capturing ------------------------------------------------------------------------

    def capture(
        self,
        value: Any,
        counter: CallCounter,
        number: int,
        when: object = True,
        changed: bool = False,
        shard: Shard | None = None,
        to: Sequence[Queue] | None = None,
        run: CompiledRun | None = None,
        tags: dict[str, str] | None = None,
    ) -> Ticket:
        """Make a record of call `number` of this counter and queue it, `to` these queues only."""
        start = _now()
        queues = self._accepting if to is None else to
        if when is not True and not (when(value) if callable(when) else when):
            self.ledger.charge("select", _now() - start)
            return SKIPPED
        if not queues:
            self.count_unheard()
            return SKIPPED
        if shard is not None and not isinstance(shard, Shard):
            raise TypeError(f"shard must be a Shard, got {shard!r:.80}")
        if is_busy():
            self.ledger.drop_values(BUSY, calls=1)
            return SKIPPED
        cls = type(value)
        adapter = adapter_of(cls)
        if adapter.local_shard is not None:
            value, shard = adapter.local_shard(value)
            cls = type(value)
            adapter = adapter_of(cls)
        digest = frameworks.digest_of(value) if changed else None
        if digest is not None and not counter.differs(digest):
            self.ledger.charge("select", _now() - start)
            return SKIPPED
        name, step, call = counter.name, counter.step, number - counter.base
        if step is None:  # without a training step, calls count as steps
            step, call = number, 0
        if run is not None:
            call = call * run.devices + run.device
        rank, world_size = ranks.rank_and_world_size()
        nbytes = adapter.nbytes(value, ())
        large = nbytes > SMALL  # the time of small values is not split
        selected = _now() if large else 0
        if len(queues) > 1 or not queues[0].admit(nbytes, name, _VALUE, step, rank):
            queues = admit(queues, nbytes, name, _VALUE, step, rank) if len(queues) > 1 else ()
            if not queues:
                return self._reject(counter, start)
        admitted = _now() if large else 0
        try:
            snapshot = self._snapshot(adapter, value, queues)
        except OutOfMemory:
            for queue in queues:
                queue.reject(name, _VALUE, step, rank)
            return self._reject(counter, start)
        except BaseException:
            counter.digest = None
            raise
        copied = _now() if large else 0
        tensor = snapshot if type(snapshot) is TensorData else _NO_TENSOR
        record = Record(
            name, _VALUE, step, call, self.next_seq(), rank, world_size, time.time_ns(),
            type_name(cls), tensor.dtype, tensor.shape, shard, digest, snapshot, None,
            tags or ({} if run is None else run.tags),
        )  # fmt: skip
        ticket = write_to(queues, record, nbytes)
        if large:
            waited = admitted - selected + _now() - copied
            self.ledger.capture(nbytes, selected - start, waited, copied - admitted)
        else:
            fast_path = self._fast_path
            if self.fast is not None and fast_path is not None and cls not in fast_path.unsuited:
                fast_path.learn(value, adapter, snapshot)
            self.ledger.capture_small(nbytes, _now() - start)
        return ticket

    def _snapshot(self, adapter: Adapter, value: Any, queues: Sequence[Queue]) -> Value:
        """Copy a value; wait for memory if the overflow policy of a queue is to wait."""
        while True:
            try:
                return adapter.snapshot(value, self.pool, ())[0]
            except OutOfMemory:
                if not any(queue.await_progress() for queue in queues):
                    raise

    def _reject(self, counter: CallCounter, start: int) -> Ticket:
        counter.digest = None  # this content was not captured
        self.ledger.charge("select", _now() - start, 1)
        return SKIPPED

    def put(self, record: Record, nbytes: int = 0, *, captured: bool = False) -> Ticket:
        """Queue a record that a source has made; `captured` if it counts as a captured value."""
        name, kind, step, rank = record.name, record.kind, record.step, record.rank
        if is_busy():
            self.ledger.drop_values(BUSY)
            return SKIPPED
        queues = admit(self._accepting, nbytes, name, kind, step, rank)
        return write_to(queues, record, nbytes, captured=captured)

    def put_columns(self, columns: RecordColumns) -> bool:
        """Queue records as columns; return False if they have to be put one by one."""
        queues, count = self._accepting, len(columns.heads)
        if len(queues) != 1 or not queues[0].sink.takes_columns or not queues[0].has_room(count):
            return False
        entry: Any = columns
        write_to(queues, entry, (count - 1) * OVERHEAD, captured=False)
        return True

    def put_captured(self, record: Record, nbytes: int, start: int) -> None:
        """Queue a record of a copied value and count it; `start` is when copying it began."""
        if self._accepting:
            if self.put(record, nbytes, captured=True) is not SKIPPED:
                self.ledger.capture_small(nbytes, _now() - start, calls=0)
        elif self.enabled:
            self.ledger.drop_values(DISCONNECTED)

    def fault(
        self, name: object, error: Exception, what: str = "was not captured", *, calls: int = 0
    ) -> Ticket:
        """Count an error under a name, and log it once; raise it if ``TENSORTAP_STRICT`` is set.

        `calls` is 1 if a call counter has ticked for the value.
        """
        if isinstance(error, Busy):
            self.ledger.drop_values(BUSY, calls=calls)
            return SKIPPED
        if self.strict:
            raise error
        self.ledger.drop_values(ERROR, calls=calls)
        if is_of_handler(error):
            raise error
        key = (str(name), type(error).__name__)
        if key not in self._errors:
            self._errors.add(key)
            reason = f"{type(error).__name__}: {error}" if str(error) else repr(error)
            log.warning("tensortap: %r %s: %s", name, what, reason)
        return SKIPPED

    # -- the end --------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for values that are still being computed and belong to the current step."""
        for wait in self.settlers:
            with contextlib.suppress(Exception):  # a failed computation raises for its user
                wait()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything captured has arrived or was dropped; return False on timeout."""
        if is_busy():  # the threads of the queues may wait for what this thread holds
            return False
        deadline = None if timeout is None else time.monotonic() + timeout
        self.settle()
        done = True
        for queue in list(self._attached):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done = queue.flush(left) and done
        return done

    def close(self) -> None:
        """Flush for at most two seconds and end all queues; nothing is captured from then on."""
        if self.closed:
            return
        self.settle()
        self.closed = True
        self.refresh()
        deadline = time.monotonic() + EXIT
        for queue in list(self._attached):
            with contextlib.suppress(Exception):
                queue.close(max(0.05, deadline - time.monotonic()))

    def receipt(self) -> Receipt:
        """Return what was captured, what was not and why, and what it cost."""
        calls = [counter.calls for counter in list(self.counters.values())]
        steps = self.clock.steps
        if not steps and self.clock.step is None:
            steps = max(calls, default=0)
        receipt = self.ledger.receipt(sum(calls), steps, self.clock.stepping, self.pool.taken)
        return dataclasses.replace(receipt, probes=probes.looked_at())


pipeline = Pipeline()
