"""Digests of replicas as records, for jobs whose ranks share no store.

Each rank records one ballot per check. Whoever has the records of all ranks counts them: a live
session while they arrive, a run when its alerts are read.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tensortap.alerts.alert import Alert
from tensortap.alerts.vote import (
    BatchVote,
    GroupDigests,
    GroupKey,
    ReplicaLayout,
    ReplicaMessage,
    ReplicaVote,
    vote_of,
)
from tensortap.record import Blob, Kind, Record

BALLOT = "tensortap.replicas"
"""The name of such records."""

_PATIENCE = 60_000_000_000  # nanoseconds for which a rank may be late
_STEPS = 1024  # that wait for a rank
_MOST = 1 << 14  # ballots and layouts that wait; records may come from anyone


class Ballot(msgspec.Struct, frozen=True, array_like=True):
    """The digests of a rank in a step; `check` tells apart the models that a job compares.

    `layouts` are given from time to time, by their hash.
    """

    check: str
    message: ReplicaMessage
    layouts: dict[str, tuple[ReplicaLayout, ...]] = {}


_decode = msgspec.msgpack.Decoder(Ballot).decode


def value_of_ballot(ballot: Ballot) -> Blob:
    """Return the value of the record of a ballot."""
    return Blob("bytes", msgspec.msgpack.encode(ballot))


class BallotBox:
    """Counts ballots: a group of ranks is compared in a step once all of them have sent theirs."""

    def __init__(self) -> None:
        self._votes: dict[Any, ReplicaVote | BatchVote] = {}
        self._layouts: dict[str, tuple[ReplicaLayout, ...]] = {}
        self._waiting: dict[Any, dict[int, dict[int, GroupDigests]]] = {}  # step → rank
        self._since: dict[Any, dict[int, int]] = {}  # step → time of its first ballot
        self._counted: dict[Any, int] = {}  # the last step

    def add(self, record: Record) -> list[Alert]:
        """Take a record; return the alerts about replicas that have begun to differ."""
        if record.name != BALLOT or record.kind is not Kind.VALUE:
            return []
        try:
            ballot = _decode(record.value.data) if isinstance(record.value, Blob) else None
        except msgspec.DecodeError:
            return []
        if ballot is None or len(self._layouts) + len(self._waiting) > _MOST:
            return []
        self._layouts.update(ballot.layouts)
        alerts: list[Alert] = []
        for digests in ballot.message.groups:
            group, step = (ballot.check, digests.key), ballot.message.step
            if step > self._counted.get(group, -1) and record.rank in digests.ranks:
                self._waiting.setdefault(group, {}).setdefault(step, {})[record.rank] = digests
                self._since.setdefault(group, {}).setdefault(step, record.time_ns)
                alerts += self._count(group, record.time_ns - _PATIENCE)
        return alerts

    def close(self) -> list[Alert]:
        """Count what is left, without the ranks that are missing."""
        return [alert for group in list(self._waiting) for alert in self._count(group, None)]

    def _count(self, group: tuple[str, GroupKey], before: int | None) -> list[Alert]:
        """Compare the steps of a group that are complete, or older than a time; None: all."""
        ranks, waiting, since = group[1][0], self._waiting[group], self._since[group]
        alerts: list[Alert] = []
        for step in sorted(waiting):
            later = {rank for each in waiting if each >= step for rank in waiting[each]}
            is_late = before is None or since[step] < before or len(waiting) > _STEPS
            if len(later) < len(ranks) and not is_late:
                break  # what is missing may still come: a rank sends its ballots in order
            digests = {r: d for r, d in waiting.pop(step).items() if self._is_known(d)}
            self._counted[group] = step
            del since[step]
            vote = self._votes.setdefault(group, vote_of(group[1]))
            if len(digests) > 1:
                alerts += vote.compare(step, digests, self._layouts)
        return alerts

    def _is_known(self, digests: GroupDigests) -> bool:
        layout = self._layouts.get(digests.layout)
        return layout is not None and len(digests.sums) == 16 * len(layout)
