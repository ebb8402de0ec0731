"""The seam between a queue and whatever keeps or sends records."""

from __future__ import annotations

import contextlib
import os
import select
from typing import Protocol

from tensortap.capture.ledger import Entry, Ledger
from tensortap.core.record import Kind


class Wake:
    """An event that a thread can wait for together with other file descriptors."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        """Wake the thread that waits."""
        # a full pipe: it is set already; a closed one: nobody waits any more
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._write, b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def wait(self, timeout: float) -> None:
        """Wait until it is set, or for `timeout` seconds, and clear it."""
        poll = select.poll()  # unlike select, it takes descriptors above 1023
        poll.register(self._read, select.POLLIN)
        if poll.poll(timeout * 1000):
            self.clear()

    def close(self) -> None:
        read, write, self._read, self._write = self._read, self._write, -1, -1
        os.close(read)
        os.close(write)


class Sink(Protocol):
    """Takes records from a queue.

    All calls come from the thread of the queue, unless a method says otherwise. Only `send` has
    no default. `ledger` is where the sink reports what it drops.
    """

    ledger: Ledger
    patience: float = 0.0
    """Seconds for which records without values may gather before the thread wakes up."""
    takes_blocks: bool = False
    """Whether `send` also takes blocks of small records."""

    @property
    def accepting(self) -> bool:
        """True if the sink takes new records; read by the training thread."""
        return True

    @property
    def unreachable(self) -> bool:
        """True if the sink will never take the queued records, so that the queue drops them."""
        return False

    @property
    def failing(self) -> str:
        """The reason why nothing can be taken for now, such as a full disk; else empty."""
        return ""

    @property
    def pending(self) -> int:
        """Bytes that were taken and are not settled yet."""
        return 0

    @property
    def takes_columns(self) -> bool:
        """True if the sink takes `RecordColumns` as well."""
        return False

    def room(self) -> int:
        """Return how many bytes can be taken now; the queue hands nothing over at 0."""
        return 1 << 62

    def send(self, entries: list[Entry]) -> None:
        """Take the entries and settle their tickets when it is known whether they arrived."""
        ...

    def wait(self, wake: Wake, timeout: float) -> None:
        """Do background work until `wake` is set, or for at most `timeout` seconds."""
        wake.wait(timeout)

    def hurry(self) -> None:
        """Send what was gathered: somebody waits for it."""
        return

    def note_dropped(self, name: str, kind: Kind, step: int, rank: int) -> None:
        """Note a value that found no room in the queue; called by the training thread."""
        return

    def give_up(self) -> list[Entry]:
        """Return all entries that are not settled and will not be; called by any thread."""
        return []

    def close(self) -> None:
        """Release what the sink holds."""
        return
