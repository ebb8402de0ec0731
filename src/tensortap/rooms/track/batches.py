"""Tensors that a tracker observes together: summarized by one call, recorded as columns."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tensortap import values as frameworks
from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.record import Record
from tensortap.rooms.track.observing import Observed
from tensortap.stats import summarize
from tensortap.stats.columns import Memory, RecordColumns, SummaryColumns

_now = time.perf_counter_ns
_FEW = 3  # looks of which the cheapest is the usual one

ObservedTensor = tuple[Observed, Any]
"""A tensor after its description."""


def summarize_many(arrays: list[Memory]) -> SummaryColumns:
    """Return the statistics of arrays in memory, from one call of the kernel.

    It runs on several threads and without the interpreter lock. It takes no complex128. The memory
    must stay valid during the call.
    """
    return SummaryColumns(*summarize.kernel.summarize_many(arrays, summarize.AUTO))


def summarize_tensors(tensors: list[Any]) -> SummaryColumns | None:
    """Return the statistics of tensors of which the kernel finds the elements itself, or None."""
    if summarize.kernel is None:
        return None
    columns = summarize.kernel.summarize_many(tensors, summarize.AUTO)
    return None if columns is None else SummaryColumns(*columns)


def summarize_together(
    found: Sequence[ObservedTensor],
    take: Callable[[Sequence[ObservedTensor], SummaryColumns], None],
    take_one: Callable[[Observed, Any], object],
    fault: Callable[[str, Exception], None],
    count: Callable[[Sequence[ObservedTensor], int], None],
) -> None:
    """Summarize tensors in memory together and hand them to `take`; the others to `take_one`."""
    if not found:
        return
    start = _now()
    columns = summarize_tensors([value for _, value in found])
    if columns is not None:
        take(found, columns)
        count(found, _now() - start)
        return
    memories = [memory_of(value) for _, value in found]
    pairs = itertools.groupby(
        zip(found, memories, strict=True), key=lambda pair: pair[1] is not None
    )
    for in_memory, group in pairs:
        batch, places = zip(*group, strict=True)
        if in_memory:
            take(batch, summarize_many(list(places)))
            count(batch, _now() - start)
        else:
            for observed, value in batch:
                try:
                    take_one(observed, value)
                except Exception as error:
                    fault(observed.name, error)
        start = _now()


def memory_of(value: Any) -> Memory | None:
    """Return where the kernel finds the elements of a tensor; None for the general way."""
    try:
        return frameworks.memory_of(value)
    except Exception:  # the general way raises again, and its error gets the name
        return None


def usual(known: float, found: float) -> float:
    """Follow the median of costs from one to the next: the scheduler interrupts some of them.

    >>> usual(0.0, 50.0), usual(100.0, 30.0), round(usual(100.0, 5000.0))
    (50.0, 90.0, 110)
    """
    if not known:
        return found
    return min(found, 1.1 * known) if found > known else max(found, 0.9 * known)


class Costs(dict[tuple[str, str], list[int]]):
    """The number of looks at a name, and their nanoseconds, by kind and name."""

    total = 0  # nanoseconds

    def __init__(self) -> None:
        self.usual: dict[tuple[str, str], float] = {}  # nanoseconds of a look

    def add(self, found: Iterable[Observed], spent: Sequence[int]) -> None:
        """Count tensors, and what each has cost the training thread."""
        for observed, nanoseconds in zip(found, spent, strict=True):
            key = observed.kind, observed.name
            known = self.get(key)
            if known is None:
                known = self[key] = [0, 0]
            known[0] += 1
            known[1] += nanoseconds
            before = self.usual.get(key, 0.0)
            # the first look is the dearest
            few = known[0] <= _FEW and nanoseconds < before
            self.usual[key] = float(nanoseconds) if few else usual(before, nanoseconds)
        self.spend(sum(spent), len(spent))

    def spend(self, spent: int, count: int = 0) -> None:
        """Count time of the training thread that belongs to no name."""
        self.total += spent
        pipeline.ledger.track(spent, count)

    def share(self, found: Sequence[ObservedTensor], spent: int) -> None:
        """Count tensors that were looked at together; each costs as its elements do."""
        sizes = [max(1, math.prod(observed.shape)) for observed, _ in found]
        total = sum(sizes)
        self.add([observed for observed, _ in found], [spent * size // total for size in sizes])


class ColumnMaker:
    """Makes columns of records; what stays the same from step to step comes from a cache."""

    def __init__(self, head_of: Callable[[Observed], Record]) -> None:
        self._head_of = head_of
        self._heads: dict[tuple[str, str, int], tuple[Observed, Record]] = {}
        self._tuples: dict[int, tuple[Record, ...]] = {}  # by the identity of the first head

    def columns(
        self,
        found: Iterable[Observed],
        stats: SummaryColumns,
        step: int,
        times: Sequence[int] | None = None,
    ) -> RecordColumns:
        """Return the records of tensors as columns; without `times`, all were observed now."""
        heads = self._all_heads(found)
        next_seq = pipeline.next_seq
        seqs = [next_seq() for _ in heads]
        times = [time.time_ns()] * len(heads) if times is None else times
        return RecordColumns(heads, step, seqs, *ranks.rank_and_world_size(), times, stats)

    def _all_heads(self, found: Iterable[Observed]) -> tuple[Record, ...]:
        heads = tuple([self._head(observed) for observed in found])
        known = self._tuples.get(id(heads[0]))
        if known == heads:
            return known
        if len(self._tuples) > 64:
            self._tuples.clear()
        self._tuples[id(heads[0])] = heads
        return heads

    def _head(self, observed: Observed) -> Record:
        key = observed.kind, observed.name, observed.call
        known = self._heads.get(key)
        if known is None or (known[0] is not observed and known[0] != observed):
            known = self._heads[key] = observed, self._head_of(observed)
        return known[1]


class ObservedBatch:
    """Tensors that hooks observe one after the other: summarized at once, recorded together.

    They are handed over at the end of a step, when somebody asks for records, and after a
    quarter of a second.
    """

    def __init__(
        self, maker: ColumnMaker, send: Callable[[RecordColumns], None], costs: Costs
    ) -> None:
        self._maker = maker
        self._send = send
        self._costs = costs
        self.summaries = summarize.kernel.SummaryBatch()
        self._lock = threading.RLock()  # another thread may ask for records during training

    def add(self, observed: Observed, memory: Memory, step: int, start: int) -> None:
        """Summarize a tensor; `start` is when the hook began, by `time.perf_counter_ns`."""
        if step != self.summaries.step:
            self._begin(step)
        self.summaries.add(observed, start, *memory)
        if self.summaries.due:
            self.hand_over()

    def _begin(self, step: int) -> None:
        with self._lock:
            self.hand_over()
            self.summaries.step = step

    def hand_over(self) -> None:
        """Send the records of all tensors so far."""
        if not len(self.summaries):
            return
        with self._lock:
            found, times, spent, columns = self.summaries.take()
            if not found:
                return
            self._costs.add(found, spent)
            try:
                stats = SummaryColumns(*columns)
                self._send(self._maker.columns(found, stats, self.summaries.step, times))
            except Exception as error:
                for observed in found:  # each of them counts as dropped
                    pipeline.fault(observed.name, error)
