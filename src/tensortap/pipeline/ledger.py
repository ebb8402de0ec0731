"""The ledger: what sources and sinks report about counts, losses and costs."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Collection

from tensortap.history import OVERHEAD
from tensortap.pipeline.fast import QueueState
from tensortap.pipeline.receipt import Receipt
from tensortap.pipeline.selection import count_of, seconds_per_skip
from tensortap.pipeline.ticket import Ticket, settle
from tensortap.record import Record

OVER_BUDGET = "over budget"  # the queue was full
DISCONNECTED = "disconnected"  # nobody listened, or the connection was lost
ERROR = "error"  # the value could not be captured or sent
TOO_LARGE = "too large"  # larger than all that the receiver can hold
REASONS = (OVER_BUDGET, DISCONNECTED, ERROR, TOO_LARGE)

_ACTIVITIES = ("select", "queue", "copy", "small values", "connecting", "tracking")
_COLUMNS = ("calls", "captured", "tracked", "bytes", *_ACTIVITIES)
_ROWS = 4096  # rows that may wait to be added up

Entry = tuple[Record, Ticket, int]
"""A queued record, its ticket and its weight in bytes: a plain tuple, made for every capture."""


class Ledger:
    """Counts and costs of one pipeline.

    The training thread only appends rows, without a lock. They are added up from time to time.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, str] = {}  # address → state, as live sinks report it
        self._lock = threading.Lock()
        self._rows: collections.deque[tuple[int, ...]] = collections.deque()
        self._totals = [0] * len(_COLUMNS)
        self._dropped: collections.Counter[str] = collections.Counter()
        self._unheard = itertools.count()
        # advanced for each call while nobody listens: one atomic C call
        self.count_unheard: Callable[[], int] = self._unheard.__next__
        self._queues: list[QueueState] = []

    # -- what the training thread reports -------------------------------------------------

    def capture(self, nbytes: int, select: int, queue: int, copy: int) -> None:
        """Count a captured value and the nanoseconds that it took, by activity."""
        self._add((1, 1, 0, nbytes, select, queue, copy, 0, 0, 0))

    def capture_small(self, nbytes: int, ns: int, *, calls: int = 1) -> None:
        """Count a captured value whose time is not split; `calls` is 0 if no counter ticked."""
        self._add((calls, 1, 0, nbytes, 0, 0, 0, ns, 0, 0))

    def reject(self, ns: int) -> None:
        """Charge a call whose value no queue had room for; the queues count what they drop."""
        self._add((1, 0, 0, 0, ns, 0, 0, 0, 0, 0))

    def skip(self, ns: int) -> None:
        """Charge a call that was skipped after its value was looked at."""
        self._add((0, 0, 0, 0, ns, 0, 0, 0, 0, 0))

    def connect(self, ns: int) -> None:
        """Charge the time that connecting took."""
        self._add((0, 0, 0, 0, 0, 0, 0, 0, ns, 0))

    def track(self, ns: int) -> None:
        """Count a tensor that was observed."""
        self._add((0, 0, 1, 0, 0, 0, 0, 0, 0, ns))

    def fail(self, *, calls: int) -> None:
        """Count a value that could not be captured; `calls` is 0 if no counter ticked."""
        self.drop_values(ERROR)
        self._add((calls, 0, 0, 0, 0, 0, 0, 0, 0, 0))

    def _add(self, row: tuple[int, ...]) -> None:
        self._rows.append(row)
        # if another thread is adding up, it takes this row as well
        if len(self._rows) > _ROWS and self._lock.acquire(blocking=False):
            try:
                self._add_up()
            finally:
                self._lock.release()

    def _add_up(self) -> None:
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        self._totals = [sum(column) for column in zip(self._totals, *rows, strict=True)]

    # -- what queues and sinks report -----------------------------------------------------

    def add_queue(self, state: QueueState) -> None:
        """Include what a queue captures on its fast path."""
        with self._lock:
            self._queues.append(state)

    def remove_queue(self, state: QueueState) -> None:
        """Keep the counts of a queue that was closed."""
        with self._lock:
            if state in self._queues:
                self._queues.remove(state)
                n = state.captured
                self._rows.append((n, n, 0, state.nbytes, 0, 0, 0, state.spent_ns, 0, 0))

    def drop_values(self, reason: str, count: int = 1) -> None:
        """Count values that were dropped before they were captured."""
        with self._lock:
            self._dropped[reason] += count

    def drop(self, entries: Collection[Entry], reason: str) -> None:
        """Count records that were captured and will not arrive, and settle their tickets."""
        if reason == DISCONNECTED:  # a record that another sink took as well arrives there
            settle([entry for entry in entries if entry[1].shared], True)
            entries = [entry for entry in entries if not entry[1].shared]
        if not entries:
            return
        lost = [nbytes for _, ticket, nbytes in entries if ticket.captured and not ticket.shared]
        with self._lock:
            self._dropped[reason] += len(entries)
            self._rows.append((0, -len(lost), 0, len(lost) * OVERHEAD - sum(lost), *[0] * 6))
        settle(entries, False)

    # -- what people ask ------------------------------------------------------------------

    def reasons(self) -> dict[str, int]:
        """Return how many values were dropped, by reason."""
        with self._lock:
            dropped = self._dropped.copy()
        dropped[DISCONNECTED] += count_of(self._unheard)
        return {reason: dropped[reason] for reason in REASONS}

    def receipt(self, calls: int, steps: int) -> Receipt:
        """Return the receipt, given how many calls of sources and training steps there were."""
        reasons = self.reasons()
        with self._lock:
            self._add_up()
            totals = dict(zip(_COLUMNS, self._totals, strict=True))
            for queue in self._queues:
                totals["calls"] += queue.captured
                totals["captured"] += queue.captured
                totals["bytes"] += queue.nbytes
                totals["small values"] += queue.spent_ns
        skipped = max(0, calls - totals["calls"] - count_of(self._unheard))
        activities = {name: totals[name] / 1e9 for name in _ACTIVITIES}
        activities["skipping"] = skipped * seconds_per_skip()
        seconds = sum(activities.values())
        return Receipt(
            captured=max(0, totals["captured"]),
            tracked=totals["tracked"],
            skipped=skipped,
            dropped=sum(reasons.values()),
            reasons=reasons,
            bytes=max(0, totals["bytes"]),
            steps=steps,
            seconds=seconds,
            seconds_per_step=seconds / steps if steps else 0.0,
            activities=activities,
            sessions=dict(self.sessions),
        )
