"""The ledger: what sources and sinks report about counts, losses and costs; and the receipt."""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from tensortap.capture.fast import QueueState, RecordBlock
from tensortap.capture.selection import count_of, seconds_per_skip
from tensortap.capture.ticket import Ticket, settle
from tensortap.core.history import OVERHEAD
from tensortap.core.limits import format_size
from tensortap.core.probes import Probe
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


@dataclasses.dataclass(frozen=True, slots=True)
class Receipt:
    """Counts of captured and lost values, with reasons, and the cost to the training thread."""

    captured: int  # values that were copied and not dropped afterwards
    tracked: int  # tensors whose statistics were computed
    skipped: int  # calls that the selection left out
    dropped: int  # values that did not arrive, for any of the `reasons`
    reasons: dict[str, int]  # over budget, disconnected, error, too large, busy
    bytes: int
    steps: int
    seconds: float  # in the training thread
    seconds_per_step: float
    activities: dict[str, float]  # seconds by activity
    sessions: dict[str, str]  # address → state of each live session
    stepping: float = 0.0  # seconds that these steps took in all, tensortap included
    memory: int = 0  # bytes that tensortap takes for values on their way
    probes: tuple[Probe, ...] = ()  # how often each name was looked at, and what that cost

    @property
    def share(self) -> float:
        """The share of the steps that tensortap took in the training thread; 0 if not known.

        Connecting does not count: it happens once, in most programs before the first step ends.
        """
        seconds = self.seconds - self.activities.get("connecting", 0.0)
        return min(1.0, seconds / self.stepping) if self.stepping else 0.0

    def since(self, earlier: Receipt) -> Receipt:
        """Return what was added since an earlier receipt."""
        counts = ("captured", "tracked", "skipped", "dropped", "bytes", "steps", "stepping")
        added: dict[str, Any] = {
            name: max(0, getattr(self, name) - getattr(earlier, name)) for name in counts
        }
        for name in ("reasons", "activities"):
            before = getattr(earlier, name)
            now = getattr(self, name).items()
            added[name] = {key: max(0, each - before.get(key, 0)) for key, each in now}
        seconds = added["seconds"] = sum(added["activities"].values())
        added["seconds_per_step"] = seconds / added["steps"] if added["steps"] else 0.0
        return dataclasses.replace(self, **added)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        tracked = f", {self.tracked:,} tracked" if self.tracked else ""
        reasons = ", ".join(f"{count:,} {why}" for why, count in self.reasons.items() if count)
        steps = (
            f", {format_seconds(self.seconds_per_step)} per step over {self.steps:,} steps"
            if self.steps
            else ""
        )
        share = f" ({self.share:.2%} of their time)" if self.share else ""
        largest_first = sorted(self.activities.items(), key=lambda item: -item[1])
        activities = [f"{name} {format_seconds(s)}" for name, s in largest_first if s > 0]
        lines = [
            f"tensortap receipt: {self.captured:,} captured ({format_size(self.bytes)}){tracked}, "
            f"{self.skipped:,} skipped, {self.dropped:,} dropped" + (reasons and f" ({reasons})"),
            f"  training thread: {format_seconds(self.seconds)}{steps}{share}",
            f"  spent on: {', '.join(activities) or 'nothing'}",
        ]
        if seen := sorted(probe.seen for probe in self.probes if probe.spent_ns):
            dearest = max(self.probes, key=lambda probe: probe.spent_ns)
            lines.append(
                f"  looked at {len(seen):,} names, each {seen[0]:,} to {seen[-1]:,} times; the "
                f"dearest: {dearest.name} ({dearest.kind}), {dearest.seen:,} times, "
                f"{format_seconds(dearest.spent_ns / 1e9)}"
            )
        if self.memory:
            lines.append(f"  memory for values on their way: {format_size(self.memory)}")
        lines.extend(f"  live session {where}: {state}" for where, state in self.sessions.items())
        return "\n".join(lines)


def format_seconds(seconds: float) -> str:
    """Return a duration as people read it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


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
