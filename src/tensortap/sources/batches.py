"""Tensors that a tracker observes together: summarized by one call, recorded as columns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from tensortap import frameworks, ranks
from tensortap.frameworks.observing import Observed
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Record
from tensortap.stats.columns import RecordColumns, SummaryColumns, summarize_many

_TUPLES = 64  # sets of tensors that are observed together
_now = time.perf_counter_ns

ObservedTensor = tuple[Observed, Any]
"""A tensor after its description."""


def summarize_together(
    found: Sequence[ObservedTensor],
    take: Callable[[Sequence[ObservedTensor], SummaryColumns], None],
    take_one: Callable[[Observed, Any], object],
) -> None:
    """Summarize tensors in memory together and hand them to `take`; the others to `take_one`."""
    start = _now()
    memories = _memories(found)
    if memories and None not in memories:
        take(found, summarize_many(memories))
        pipeline.ledger.track(_now() - start, len(found))
        return
    pairs = itertools.groupby(
        zip(found, memories, strict=True), key=lambda pair: pair[1] is not None
    )
    for in_memory, group in pairs:
        batch, places = zip(*group, strict=True)
        if in_memory:
            take(batch, summarize_many(list(places)))
            pipeline.ledger.track(_now() - start, len(batch))
        else:
            for observed, value in batch:
                try:
                    take_one(observed, value)
                except Exception as error:
                    pipeline.fault(observed.name, error)
        start = _now()


def _memories(found: Sequence[ObservedTensor]) -> list[Any]:
    memory_of = frameworks.memory_of
    try:
        return [memory_of(value) for _, value in found]
    except Exception:  # observing it alone raises again, with its name
        return [None] * len(found)


class ColumnMaker:
    """Makes columns of records; what stays the same from step to step comes from a cache."""

    def __init__(self, head_of: Callable[[Observed], Record]) -> None:
        self._head_of = head_of
        self._heads: dict[tuple[str, str, int], tuple[Observed, Record]] = {}
        self._tuples: dict[int, tuple[Record, ...]] = {}  # by the identity of the first head

    def columns(
        self, found: Sequence[ObservedTensor], stats: SummaryColumns, step: int
    ) -> RecordColumns:
        """Return the records of tensors as columns."""
        heads = self._all_heads(found)
        next_seq = pipeline.next_seq
        seqs = [next_seq() for _ in heads]
        rank, world_size = ranks.rank_and_world_size()
        return RecordColumns(heads, step, seqs, rank, world_size, time.time_ns(), stats)

    def _all_heads(self, found: Sequence[ObservedTensor]) -> tuple[Record, ...]:
        heads = tuple([self._head(observed) for observed, _ in found])
        known = self._tuples.get(id(heads[0]))
        if known == heads:
            return known
        if len(self._tuples) > _TUPLES:
            self._tuples.clear()
        self._tuples[id(heads[0])] = heads
        return heads

    def _head(self, observed: Observed) -> Record:
        key = observed.kind, observed.name, observed.call
        known = self._heads.get(key)
        if known is None or (known[0] is not observed and known[0] != observed):
            known = self._heads[key] = observed, self._head_of(observed)
        return known[1]
