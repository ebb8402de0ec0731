"""A queue with a byte budget, and the thread that empties it into a drain.

The training thread appends; everything else happens here. The thread takes what has gathered
every few milliseconds and hands it on in one piece: a background thread that runs Python all
the time would cost training far more than the work it does, because torch must wait for the
interpreter lock after every operation.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import threading
import time
from typing import Any, Protocol

from tensortap.history import OVERHEAD
from tensortap.pipeline.fast import Hot, Meter
from tensortap.pipeline.ticket import Ticket, settle
from tensortap.record import Kind, Record

log = logging.getLogger("tensortap")

PAUSE = 0.005  # between two hand-overs while records keep coming
LONG_PAUSE = 0.025  # the same when many come: each hand-over takes the interpreter from training
MANY = 8
POLICIES = ("latest", "newest", "block")


Entry = tuple[Record, Ticket, int]  # a record in the queue, and what it weighs: a plain tuple,
# because one is made for every capture


class Wake:
    """A bell that a thread which polls file descriptors can hear."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def ring(self) -> None:
        # full: it is ringing already; closed: nobody listens any more
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._write, b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def wait(self, timeout: float) -> bool:
        """Wait for the bell alone."""
        rang = bool(select.select([self._read], [], [], timeout)[0])
        if rang:
            self.clear()
        return rang

    def close(self) -> None:
        read, write, self._read, self._write = self._read, self._write, -1, -1
        os.close(read)
        os.close(write)


class Drain(Protocol):
    """Where a background queue empties into; all calls come from its one thread."""

    @property
    def accepting(self) -> bool:
        """Whether records are wanted at all; read by the training thread."""
        ...

    def room(self) -> int:
        """How many bytes can be taken now; nothing is handed over at 0."""
        ...

    def send(self, entries: list[Entry]) -> None:
        """Take the entries; their tickets are settled when their fate is known."""
        ...

    @property
    def pending(self) -> int:
        """Bytes that were taken and whose fate is open."""
        ...

    def wait(self, wake: Wake, timeout: float) -> None:
        """Do what is to be done besides, waiting for the bell or at most `timeout` seconds."""
        ...

    def hurry(self) -> None:
        """Somebody waits: do not gather more first."""
        ...

    def missed(self, name: str, kind: Kind, step: int, rank: int) -> None:
        """A value that found no room; called by the training thread."""
        ...

    def give_up(self) -> list[Entry]:
        """Entries that were taken and that will not be sent: they are counted as lost."""
        ...

    def close(self) -> None: ...


class Background:
    """A sink: a drain behind a queue, on a thread of its own."""

    def __init__(self, drain: Drain, *, budget: int, overflow: str = "latest", name: str) -> None:
        if overflow not in POLICIES:
            raise ValueError(f"overflow is one of {', '.join(POLICIES)}, not {overflow!r}")
        self.drain = drain
        self.budget = budget
        self.overflow = overflow
        self.replaced = 0  # records that a newer one of their name pushed out of the queue
        self.turned_away = 0  # values that found no room
        self.lost = 0  # records that were queued and got nowhere
        self._queue: collections.deque[Entry] = collections.deque()
        self.meter = Meter()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._hurried = 0  # threads that wait for a flush: no pause for their sake
        self._handing = False  # entries are out of the queue, and the drain has not counted them
        self._closed = False
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name=f"tensortap-{name}", daemon=True)
        self._thread.start()

    @property
    def accepting(self) -> bool:
        return self.drain.accepting and not self._closed

    @property
    def dropped(self) -> int:
        """Values that are nowhere because the queue was over its budget."""
        return self.replaced + self.turned_away

    def admit(self, nbytes: int, name: str = "", kind: Kind = Kind.VALUE) -> bool:
        """Ask for room before a value is copied."""
        queued = self.meter.put - self.meter.got
        # a value larger than the budget goes through when nothing else is queued
        if not queued or queued + self.drain.pending + nbytes + OVERHEAD <= self.budget:
            return True
        return self._make_room(nbytes, name, kind)

    def _make_room(self, nbytes: int, name: str, kind: Kind) -> bool:
        nbytes += OVERHEAD
        with self._lock:
            if self.overflow == "block":
                self._hurried += 1
                self._wake.ring()
                while not self._fits(nbytes) and self.accepting:
                    self._room.wait(0.1)
                self._hurried -= 1
            elif self.overflow == "latest":
                self._compact()
            if self._fits(nbytes) or self._replace(nbytes, name, kind):
                return True
            self.turned_away += 1
            return False

    def _fits(self, nbytes: int) -> bool:
        queued = self.meter.put - self.meter.got
        return not queued or queued + self.drain.pending + nbytes <= self.budget

    def _compact(self) -> None:
        """Keep the latest of each name: the older ones make room."""
        latest: dict[tuple[str, str, int], Entry] = {}
        older: list[Entry] = []
        queue = self._queue
        for _ in range(len(queue)):  # other threads may append meanwhile
            entry = queue.popleft()
            record = entry[0]
            key = (record.name, record.kind, record.rank)
            before = latest.pop(key, None)
            if before is not None:
                older.append(before)
            latest[key] = entry
        queue.extendleft(reversed(latest.values()))
        self._drop(older)

    def _replace(self, nbytes: int, name: str, kind: Kind) -> bool:
        """Take out the one that waits under this name, if its room is enough for a newer one."""
        if self.overflow != "latest":
            return False
        for i, entry in enumerate(list(self._queue)):
            record = entry[0]
            if record.name == name and record.kind is kind:
                others = self.meter.put - self.meter.got - entry[2]
                if others and others + self.drain.pending + nbytes > self.budget:
                    return False
                del self._queue[i]  # others only append: the place is the same
                self._drop([entry])
                return True
        return False

    def _drop(self, entries: list[Entry]) -> None:
        self.meter.got += sum([nbytes for _, _, nbytes in entries])
        self.replaced += len(entries)
        settle(entries, False)

    def write(self, record: Record, ticket: Ticket, nbytes: int) -> None:
        """Queue a record for which there is room."""
        nbytes += OVERHEAD
        # no lock: the thread that empties the queue would make training wait for it. An append
        # is atomic, and so is this sum, as no other thread can run inside of it.
        self._queue.append((record, ticket, nbytes))
        meter = self.meter
        meter.put += nbytes
        if meter.asleep:
            meter.asleep = False
            self._wake.ring()

    def fast(self, **others: Any) -> Any:
        """The fast way into this queue for small values, or None where it was not built."""
        if Hot is None:
            return None
        return Hot(
            ticket=Ticket,
            append=self._queue.append,
            hurry=self.hurry,
            ring=self._wake.ring,
            drain=self.drain,
            meter=self.meter,
            budget=self.budget,
            overhead=OVERHEAD,
            **others,
        )

    def missed(self, name: str, kind: Kind, step: int, rank: int) -> None:
        """A value that was not admitted: the drain may want to know."""
        self.drain.missed(name, kind, step, rank)

    def hurry(self) -> None:
        """Do not pause before the next hand-over."""
        self._wake.ring()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued has met its fate; False when time ran out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._hurried += 1
            try:
                while self._queue or self._handing or self.drain.pending:
                    left = None if deadline is None else deadline - time.monotonic()
                    if (left is not None and left <= 0) or not self._thread.is_alive():
                        return False
                    self._wake.ring()
                    self._room.wait(0.05 if left is None else min(left, 0.05))
            finally:
                self._hurried -= 1
        return True

    def close(self, timeout: float = 2.0) -> None:
        """Flush for at most `timeout` seconds, then end the thread."""
        start = time.monotonic()
        if self.accepting or self.drain.pending:
            self.flush(timeout)
        self._closed = True
        self._wake.ring()
        self._thread.join(max(0.5, timeout - (time.monotonic() - start)))
        self.lost += len(self.forget())

    def forget(self, *, unheard: bool = False) -> list[Entry]:
        """Drop everything that waits, because nobody is there to take it; what it was."""
        with self._lock:
            queued = [self._queue.popleft() for _ in range(len(self._queue))]
            self.meter.got += sum([nbytes for _, _, nbytes in queued])
            lost = [*self.drain.give_up(), *queued]
            self._room.notify_all()
        settle(lost, False, unheard=unheard)
        return lost

    def _take(self, room: int) -> list[Entry]:
        """As many entries as there is room for, at least one if there is any."""
        with self._lock:
            queue = self._queue
            if not queue or room <= 0:
                return []
            if self.meter.put - self.meter.got <= room:
                taken = [queue.popleft() for _ in range(len(queue))]
            else:
                taken = []
                while queue and (not taken or queue[0][2] <= room):
                    entry = queue.popleft()
                    room -= entry[2]
                    taken.append(entry)
            self.meter.got += sum([nbytes for _, _, nbytes in taken])
            self._handing = True
            return taken

    def _run(self) -> None:
        while not self._closed:
            try:
                self._cycle()
            except Exception:
                # a bug here must not end the thread: training would fill the queue unheard
                log.exception("tensortap: the background thread met an error and goes on")
                time.sleep(0.1)
        with contextlib.suppress(Exception):
            self.drain.close()
        self._wake.close()

    def _cycle(self) -> None:
        room = self.drain.room()
        if self.overflow == "latest":
            # what is under way can no longer be replaced: it must not take the whole budget
            room = min(room, max(1, self.budget // 2) - self.drain.pending)
        entries = self._take(room)
        if entries:
            try:
                self.drain.send(entries)
                if self._hurried:
                    self.drain.hurry()
            except Exception:
                # a drain that fails has taken some of them, or none: nobody knows which
                open_ = [entry for entry in entries if not entry[1].done]
                self.lost += len(open_)
                settle(open_, False)
                raise
            finally:
                with self._lock:
                    self._handing = False
                    self._room.notify_all()
            if not self._hurried:
                self._wake.wait(PAUSE if len(entries) < MANY else LONG_PAUSE)
            self.drain.wait(self._wake, 0.0)
        else:
            # asleep only with an empty queue: while the drain has no room, a bell for every
            # record would wake the thread for nothing
            self.meter.asleep = not self._queue
            if self._hurried:
                self.drain.hurry()
            if not (self.meter.asleep and self._queue):
                self.drain.wait(self._wake, 1.0)
            self.meter.asleep = False
        if self._hurried:
            with self._lock:
                self._room.notify_all()
