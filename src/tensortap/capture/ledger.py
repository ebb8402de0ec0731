"""The ledger: what sources and sinks report about counts, losses and costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from tensortap.capture.fast import QueueState, RecordBlock
from tensortap.capture.receipt import Receipt
from tensortap.capture.selection import count_of, seconds_per_skip
from tensortap.capture.ticket import Ticket, settle
from tensortap.core.history import OVERHEAD
from tensortap.core.record import Record
from tensortap.stats.columns import RecordColumns

OVER_BUDGET = "over budget"  # the queue was full
DISCONNECTED = "disconnected"  # nobody listened, or the connection was lost
ERROR = "error"  # the value could not be captured or sent
TOO_LARGE = "too large"  # larger than all that the receiver can hold
BUSY = "busy"  # a signal handler or finalizer caught it while its own thread was in tensortap
REASONS = (OVER_BUDGET, DISCONNECTED, ERROR, TOO_LARGE, BUSY)

_ACTIVITIES = ("select", "queue", "copy", "small values", "connecting", "tracking")

Entry = tuple[Record, Ticket, int]
"""A queued record, its ticket and its weight in bytes: a plain tuple, made for every capture.

To a sink that takes columns, the record may be `RecordColumns`: see `each_record`.
"""


def each_record(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield entries of single records; those of one that holds columns share its ticket."""
    for entry in entries:
        record: Any = entry[0]
        if type(record) is RecordColumns:
            yield from ((each, entry[1], OVERHEAD) for each in record.records())
        else:
            yield entry


def single(entries: Iterable[Entry | RecordBlock]) -> list[Entry]:
    """Return the entries, with those of blocks one by one; these have no record."""
    return [
        each
        for entry in entries
        for each in ((entry,) if isinstance(entry, tuple) else entry.entries())
    ]


class Ledger:
    """Counts and costs of one pipeline.

    Every thread reports here, without a lock: each count is changed by a statement without a call
    in it, which no other thread and no signal handler interrupts.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, str] = {}  # address → state, as live sinks report it
        self._calls = self._captured = self._tracked = self._nbytes = 0
        self._spent = dict.fromkeys(_ACTIVITIES, 0)  # nanoseconds
        self._dropped = dict.fromkeys(REASONS, 0)
        self._unheard = itertools.count()
        # advanced for each call while nobody listens: one atomic C call
        self.count_unheard: Callable[[], int] = self._unheard.__next__
        self._queues: dict[QueueState, bool] = {}

    # -- what sources report --------------------------------------------------------------

    def capture(self, nbytes: int, select: int, queue: int, copy: int) -> None:
        """Count a captured value and the nanoseconds that it took, by activity."""
        self._calls += 1
        self._captured += 1
        self._nbytes += nbytes
        spent = self._spent
        spent["select"] += select
        spent["queue"] += queue
        spent["copy"] += copy

    def capture_small(self, nbytes: int, ns: int, calls: int = 1) -> None:
        """Count a captured value whose time is not split; `calls` is 0 if no counter ticked."""
        self._calls += calls
        self._captured += 1
        self._nbytes += nbytes
        self._spent["small values"] += ns

    def charge(self, activity: str, ns: int, calls: int = 0) -> None:
        """Charge time; `calls` is 1 if a counter ticked for a value that was then dropped."""
        self._calls += calls
        self._spent[activity] += ns

    def track(self, ns: int, count: int = 1) -> None:
        """Count tensors that were observed."""
        self._tracked += count
        self._spent["tracking"] += ns

    # -- what queues and sinks report -----------------------------------------------------

    def add_queue(self, state: QueueState) -> None:
        """Include what a queue captures on its fast path."""
        self._queues[state] = True

    def remove_queue(self, state: QueueState) -> None:
        """Keep the counts of a queue that was closed."""
        if self._queues.pop(state, False):
            captured, nbytes, ns = state.captured, state.nbytes, state.spent_ns
            self._calls += captured
            self._captured += captured
            self._nbytes += nbytes
            self._spent["small values"] += ns

    def drop_values(self, reason: str, count: int = 1, *, calls: int = 0) -> None:
        """Count values that were dropped before they were captured.

        `calls` is how many of them a call counter has counted.
        """
        self._calls += calls
        self._dropped[reason] += count

    def drop(self, entries: Collection[Entry | RecordBlock], reason: str) -> None:
        """Count records that were captured and will not arrive, and settle their tickets."""
        elsewhere: list[Entry] = []  # other sinks have them, or will
        dropped: list[Entry] = []
        lost: list[int] = []  # bytes of those that no sink has
        count = 0
        for entry in each_record(single(entries)):
            ticket = entry[1]
            ticket.sinks -= 1
            if ticket.sinks > 0 and reason == DISCONNECTED:
                elsewhere.append(entry)
                continue
            dropped.append(entry)
            count += not ticket.failed  # else it has been counted
            if ticket.sinks <= 0 and ticket.captured:
                lost.append(entry[2] - OVERHEAD)
        captured, nbytes = len(lost), sum(lost)
        self._dropped[reason] += count
        self._captured -= captured
        self._nbytes -= nbytes
        settle(elsewhere, True)
        settle(dropped, False)

    # -- what people ask ------------------------------------------------------------------

    def reasons(self) -> dict[str, int]:
        """Return how many values were dropped, by reason."""
        dropped = self._dropped.copy()
        dropped[DISCONNECTED] += count_of(self._unheard)
        return dropped

    def receipt(self, calls: int, steps: int, stepping: float = 0.0, memory: int = 0) -> Receipt:
        """Return the receipt, given how many calls of sources and training steps there were.

        `stepping` is how long the steps took, and `memory` how many bytes are taken.
        """
        queues = list(self._queues)
        fast = sum([queue.captured for queue in queues])
        skipped = max(0, calls - self._calls - fast - count_of(self._unheard))
        activities = {name: ns / 1e9 for name, ns in self._spent.items()}
        activities["small values"] += sum([queue.spent_ns for queue in queues]) / 1e9
        activities["skipping"] = skipped * seconds_per_skip()
        seconds = sum(activities.values())
        reasons = self.reasons()
        return Receipt(
            captured=max(0, self._captured + fast),
            tracked=self._tracked,
            skipped=skipped,
            dropped=sum(reasons.values()),
            reasons=reasons,
            bytes=max(0, self._nbytes + sum([queue.nbytes for queue in queues])),
            steps=steps,
            seconds=seconds,
            seconds_per_step=seconds / steps if steps else 0.0,
            activities=activities,
            sessions=dict(self.sessions),
            stepping=stepping,
            memory=memory,
        )
