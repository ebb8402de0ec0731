"""The queue in front of every sink: a byte budget, and the thread that empties it.

The training thread appends; everything else happens in the thread of the queue. It takes what
has gathered every few milliseconds and hands it on in one piece: a thread that runs Python all
the time would cost training far more than its work, because torch has to win the interpreter
lock back after every operation.
"""

from __future__ import annotations

import collections
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tensortap.capture.fast import FastCapture, FastPath, QueueState, RecordBlock
from tensortap.capture.ledger import DISCONNECTED, ERROR, OVER_BUDGET, Entry, single
from tensortap.capture.sink import Sink, Wake
from tensortap.capture.ticket import SKIPPED, Notifier, Ticket
from tensortap.core.busy import is_busy, section
from tensortap.core.columns import Column, Columns, merged, split
from tensortap.core.dtypes import itemsize
from tensortap.core.history import OVERHEAD
from tensortap.core.record import Kind, Record

log = logging.getLogger("tensortap")

PAUSE = 0.005  # seconds between two hand-overs while records keep coming
LONG_PAUSE = 0.025  # the same when many come: each hand-over takes the interpreter from training
LONGEST_PAUSE = 0.05  # the same when all of them are small, and few for the budget
LARGE = 256 << 10  # bytes of a record, on average, from which on there is no pause
FAILING = 2.0  # seconds that the end waits for a sink that is failing
POLICIES = ("latest", "newest", "block")


class Queue:
    """Records that wait for a sink, within a byte budget, and the thread that hands them over.

    Over budget, "latest" keeps the latest record of each name, "newest" drops the value that
    found no room, and "block" makes the training thread wait. A value larger than the budget is
    admitted while nothing else is queued.
    """

    def __init__(self, sink: Sink, *, budget: int, overflow: str = "latest", name: str) -> None:
        if overflow not in POLICIES:
            raise ValueError(f"overflow must be one of {', '.join(POLICIES)}, got {overflow!r}")
        self.sink = sink
        self.ledger = sink.ledger
        self.budget = budget
        self.overflow = overflow
        self.on_change: Callable[[], None] | None = None  # when `accepting` has changed
        self.state = QueueState()
        self._entries: collections.deque[Entry | RecordBlock] = collections.deque()
        self._lock = threading.Lock()  # around taking entries out; adding them needs no lock
        self._progress = Notifier()  # for threads that wait for a flush or for room
        self._handing = False  # entries left the queue, and the sink has not counted them yet
        self._accepted = True  # as of the last call of `on_change`
        self._closed = False
        self.thread_ns = 0  # processor time of the thread
        self._wake = Wake()
        self.hurry = self._wake.set  # hand over without a pause
        self._thread = threading.Thread(target=self._run, name=f"tensortap-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: the next value tries again
            self._wake.close()
            raise
        self.ledger.add_queue(self.state)

    # -- what the training thread calls ---------------------------------------------------

    @property
    def waiting(self) -> int:
        return sum([1 if isinstance(entry, tuple) else len(entry) for entry in [*self._entries]])

    @property
    def accepting(self) -> bool:
        return self.sink.accepting and not self._closed

    def admit(self, nbytes: int, name: str, kind: Kind, step: int, rank: int) -> bool:
        """Return whether there is room for a value, before it is copied; count it if not."""
        state = self.state
        queued = state.put - state.got
        if not queued or queued + self.sink.pending + nbytes + OVERHEAD <= self.budget:
            return True
        if self._make_room(nbytes + OVERHEAD, (name, kind, rank)):
            return True
        self.reject(name, kind, step, rank)
        return False

    @section  # handlers that wait within each other would fill the stack
    def await_progress(self) -> bool:
        """Wait until the sink has settled a record, if the policy is "block"; else return False."""
        left = self._unsettled()
        if self.overflow != "block" or not left or threading.current_thread() is self._thread:
            return False
        self._wake.set()
        self._progress.wait_for(lambda: self._unsettled() < left or not self.accepting)
        return self.accepting

    def _unsettled(self) -> int:
        return self.state.put - self.state.got + self.sink.pending

    def has_room(self, count: int) -> bool:
        """Return whether there is room for this many records without values."""
        return self._fits(count * OVERHEAD)

    def reject(self, name: str, kind: Kind, step: int, rank: int) -> None:
        """Count a value for which there is no room."""
        self.ledger.drop_values(OVER_BUDGET)
        self.sink.note_dropped(name, kind, step, rank)

    def write(self, record: Record, ticket: Ticket, nbytes: int) -> None:
        nbytes += OVERHEAD
        # no lock: the thread that empties the queue would make training wait for it. An append
        # is atomic, and so is this sum, because no other thread can run inside of it.
        state = self.state
        state.block = None  # small records that follow come after this one
        state.put += nbytes  # first: an exception of a signal handler may follow a call
        self._entries.append((record, ticket, nbytes))
        if state.asleep and not self._can_gather(record, nbytes):
            state.asleep = False
            self._wake.set()

    def _can_gather(self, record: Any, weight: int) -> bool:
        """Return whether a record without a value may wait until others have come."""
        state = self.state
        few = (state.put - state.got) * 16 < self.budget
        return few and self.sink.patience > 0 and weight <= OVERHEAD * count_of(record)

    def fast_path(self, next_seq: Callable[[], int]) -> FastPath | None:
        """Return the C fast path into this queue for small values, if it was built."""
        if FastCapture is None:
            return None
        return FastPath(
            next=next_seq, append=self._entries.append, hurry=self.hurry, wake=self._wake.set,
            sink=self.sink, state=self.state, budget=self.budget, columns=self.sink.takes_blocks,
        )  # fmt: skip

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued so far is settled; return False if time ran out."""

        def settled() -> bool:
            return not (self._entries or self._handing or self.sink.pending)

        woken_at = 0.0

        def finished() -> bool:
            nonlocal woken_at
            # not at every look: the thread notifies, and the two would wake each other all the time
            if (now := time.monotonic()) > woken_at + 0.05:
                woken_at = now
                self._wake.set()
            return settled() or not self._thread.is_alive()

        if not self._progress.wait_for(finished, timeout):
            return False
        return (self._thread.is_alive() or settled()) and not self.sink.failing

    def close(self, timeout: float = 2.0) -> None:
        """Flush for at most `timeout` seconds, then end the thread and the sink.

        A sink that is failing gets no more than two seconds.
        """
        deadline, warned = time.monotonic() + timeout, False
        while (self.accepting or self.sink.pending) and self._thread.is_alive():
            left = deadline - time.monotonic()
            if self.flush(max(0.0, min(left, FAILING))) or left <= FAILING or self.sink.failing:
                break
            if not warned and self.waiting:
                warned = True
                log.warning("tensortap: waiting up to %.0f s for %d values", left, self.waiting)
        self._closed = True
        self._wake.set()
        self._thread.join(max(0.5, deadline - time.monotonic()))
        self.drop_all()
        self.ledger.remove_queue(self.state)

    def drop_all(self) -> None:
        """Drop everything that waits, because nobody is there to take it."""
        self._handing = True  # whoever finds nothing under way finds the drops counted
        queued = [] if is_busy() else self._take(1 << 62)
        self.ledger.drop([*self.sink.give_up(), *queued], DISCONNECTED)
        self._handing = False
        self._progress.notify()

    # -- over budget ----------------------------------------------------------------------

    @section  # also while it waits: see above
    def _make_room(self, nbytes: int, key: tuple[str, Kind, int]) -> bool:
        if self.overflow == "newest":
            return False
        if self.overflow == "latest":
            with self._lock:
                self._keep_latest()
                if not self._fits(nbytes):
                    self._remove(key, nbytes)
        elif threading.current_thread() is not self._thread:
            self._wake.set()
            self._progress.wait_for(lambda: self._fits(nbytes) or not self.accepting)
        return self._fits(nbytes)

    def _fits(self, nbytes: int, less: int = 0) -> bool:
        queued = self.state.put - self.state.got - less
        return not queued or queued + self.sink.pending + nbytes <= self.budget

    def _keep_latest(self) -> None:
        """Drop every record of which the queue holds a later one of the same name."""
        # Ctrl-C may raise after any call, so one call takes all entries, and one puts back those
        # that stay; other threads may append meanwhile
        entries: list[Any] = []
        dropped: list[Entry] = []
        try:
            entries.extend(itertools.islice(iter(self._entries.popleft, None), len(self._entries)))
            kept, older = self._latest_and_older(entries)
            nbytes = sum([entry[2] for entry in older])
            entries, dropped = kept, older
            self.state.got += nbytes
        finally:
            try:
                self._entries.extendleft(entries[::-1])
            finally:
                self.ledger.drop(dropped, OVER_BUDGET)

    def _latest_and_older(self, entries: list[Any]) -> tuple[list[Entry], list[Entry]]:
        latest: dict[tuple[str, Kind, int], Entry] = {}
        older: list[Entry] = []
        for entry in entries:
            if isinstance(entry, tuple):
                kept = [entry]
            else:
                self._close(entry)
                kept, others = latest_of(entry)
                older += others
            for each in kept:
                before = latest.pop(_key(each), None)
                if before is not None:
                    older.append(before)
                latest[_key(each)] = each
        return list(latest.values()), older

    def _remove(self, key: tuple[str, Kind, int], nbytes: int) -> None:
        """Drop the record of this name if that makes enough room for a newer one."""
        for i, entry in enumerate(list(self._entries)):
            if not isinstance(entry, tuple):  # another thread has captured values meanwhile
                continue
            if _key(entry) == key and self._fits(nbytes, less=entry[2]):
                del self._entries[i]  # others only append: the index still holds
                self.state.got += entry[2]
                self.ledger.drop([entry], OVER_BUDGET)
                return

    def _close(self, block: RecordBlock) -> None:
        """Let a block take no more records."""
        if self.state.block is block:
            self.state.block = None

    def _weight(self, entry: Entry | RecordBlock) -> int:
        if isinstance(entry, tuple):
            return entry[2]
        self._close(entry)
        return entry.weight

    # -- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            try:
                self._cycle()
            except Exception:
                # a bug must not end the thread: nobody would empty the queue any more
                log.exception("tensortap: error in a background thread, which continues")
                time.sleep(0.1)
        try:
            if self.sink.failing:  # it notes what it could not take
                self.sink.send(self._take(1 << 62))
            self.sink.close()
        except Exception as error:
            log.warning("tensortap: a sink could not be closed: %s", error)
        self._wake.close()

    def _cycle(self) -> None:
        # a newer record cannot replace what the sink has: leave that half of the budget
        share = self.budget // 2 if self.overflow == "latest" else self.budget
        entries = self._take(min(self.sink.room(), max(1, share) - self.sink.pending))
        if entries:
            self._hand_over(entries)
            if not self._progress.waiting:
                self._rest(entries)
            self.sink.wait(self._wake, 0.0)
        else:
            # asleep only with an empty queue: while the sink has no room, waking the thread for
            # every record would achieve nothing
            self.state.asleep = not self._entries
            if self._progress.waiting:
                self.sink.hurry()
            if not (self.state.asleep and self._entries):
                self.sink.wait(self._wake, self.sink.patience or 1.0)
            self.state.asleep = False
        if self.sink.unreachable:
            # in every cycle: a value may have been queued just when nobody was found
            self.drop_all()
        if self.accepting is not self._accepted:
            self._accepted = self.accepting
            if self.on_change is not None:
                self.on_change()
        self.thread_ns = time.thread_time_ns()
        self._progress.notify()

    def _rest(self, entries: list[Any]) -> None:
        """Let records gather after these were handed over."""
        pause = self._pause(entries)
        if self.sink.patience > pause and all(
            isinstance(each, tuple) and self._can_gather(each[0], each[2]) for each in entries
        ):
            self.state.asleep = True  # a value ends this
            pause = 0.0 if self._entries else self.sink.patience
        self._wake.wait(pause)
        self.state.asleep = False

    def _pause(self, entries: list[Any]) -> float:
        """Return for how long records may gather after these were handed over."""
        count = sum([1 if isinstance(entry, tuple) else len(entry) for entry in entries])
        nbytes = sum([entry[2] if isinstance(entry, tuple) else entry.weight for entry in entries])
        if nbytes > LARGE * count:  # little Python, and training needs their memory again
            return 0.0
        if count < 8:
            return PAUSE
        if any(isinstance(entry, tuple) for entry in entries):
            return LONG_PAUSE
        return LONGEST_PAUSE if nbytes < self.budget // 16 else LONG_PAUSE

    @section
    def _take(self, room: int) -> list[Any]:
        """Return as many entries as there is room for, at least one if there is any room."""
        queue = self._entries
        if not queue or room <= 0:
            return []
        with self._lock:
            self._handing = True
            if self.state.put - self.state.got <= room:
                taken = [queue.popleft() for _ in range(len(queue))]
            else:
                taken = []
                while queue and (not taken or self._weight(queue[0]) <= room):
                    entry = queue.popleft()
                    room -= self._weight(entry)
                    taken.append(entry)
            nbytes = sum([self._weight(entry) for entry in taken])
            self.state.got += nbytes
            return taken

    def _hand_over(self, entries: list[Any]) -> None:
        try:
            self.sink.send(entries)
            if self._progress.waiting:
                self.sink.hurry()
        except Exception:
            # the sink has taken some of them, or none: nobody knows which
            self.ledger.drop([each for each in single(entries) if not each[1].done], ERROR)
            raise
        finally:
            self._handing = False
            self._progress.notify()


def count_of(record: Any) -> int:
    """Return how many records an entry of a queue has: those of `RecordColumns`, or one."""
    return len(getattr(record, "heads", (record,)))


def _key(entry: Entry) -> tuple[str, Kind, int]:
    record = entry[0]
    return record.name, record.kind, record.rank


def admit(
    queues: Sequence[Queue], nbytes: int, name: str, kind: Kind, step: int, rank: int
) -> Sequence[Queue]:
    """Return the queues that have room for a value; the others count it as dropped."""
    if len(queues) == 1:
        return queues if queues[0].admit(nbytes, name, kind, step, rank) else ()
    return [queue for queue in queues if queue.admit(nbytes, name, kind, step, rank)]


def write_to(
    queues: Sequence[Queue], record: Record, nbytes: int, *, captured: bool = True
) -> Ticket:
    """Write a record to queues that have room for it; return its ticket."""
    if not queues:
        return SKIPPED
    ticket = Ticket(len(queues), queues[-1].hurry, False, len(queues), captured)
    for queue in queues:
        queue.write(record, ticket, nbytes)
    return ticket


# -- blocks of small records ----------------------------------------------------------------


def columns_of(block: RecordBlock) -> tuple[Column, ...]:
    """Return what the records of each column have in common."""
    return tuple(
        [
            Column(name, Kind.VALUE, *rank, type_name, framework, dtype, shape)
            for name, type_name, framework, dtype, shape, rank in block.columns
        ]
    )


def _split(block: RecordBlock, body: bytearray) -> list[Columns]:
    columns = columns_of(block)
    sizes = [
        8 if each.is_number else itemsize(each.dtype) * math.prod(each.shape) for each in columns
    ]
    return split(columns, sizes, len(block), body)


def entries_of(block: RecordBlock) -> list[Entry]:
    """Return the entries of a block with their records."""
    body = bytearray(block.nbytes)
    block.move(body)
    records = merged(_split(block, body))
    return [(record, *entry[1:]) for record, entry in zip(records, block.entries(), strict=True)]


def latest_of(block: RecordBlock) -> tuple[list[Entry], list[Entry]]:
    """Return the entries of the latest record of each column, and all others, without records."""
    body = bytearray(block.nbytes)
    block.copy(body)  # not moved: if Ctrl-C raises, the block goes back into the queue
    latest = {
        int(each.positions[-1]): each.records(len(each) - 1, len(each))[0]
        for each in _split(block, body)
    }
    entries = block.entries()
    kept = [(latest[i], *entries[i][1:]) for i in sorted(latest)]
    return kept, [entry for i, entry in enumerate(entries) if i not in latest]
