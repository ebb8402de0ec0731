"""Vote on replicas: which rank has another tensor than the others, and in which element.

Ranks send the digests of their replicas, 16 bytes per tensor. The first rank of each group of
ranks compares them here, or whoever reads the records of all ranks.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from tensortap.alerts.alert import Alert
from tensortap.dtypes import itemsize
from tensortap.record import Kind, Shard
from tensortap.stats.changed_element import changed_element

_SUMS = 16  # bytes per tensor
_MOST = 8  # tensors that are named per step and group
_CHECKS = 3  # in a row in which ranks have the same batch
_Tensor = tuple[Kind, str]
GroupKey = tuple[tuple[int, ...], bool]  # ranks, and whether each should have another tensor


class ReplicaLayout(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a rank: everything that does not change from step to step."""

    name: str
    kind: Kind
    module: str
    dtype: str
    shape: tuple[int, ...]
    shard: Shard | None
    certain: bool


class GroupDigests(msgspec.Struct, frozen=True, array_like=True):
    """The digests of one rank for one group of ranks; `layout` is a hash of its layouts.

    They should be those of every rank or, if `distinct`, other ones on each rank.
    """

    ranks: tuple[int, ...]
    layout: str
    sums: bytes
    distinct: bool = False

    @property
    def key(self) -> GroupKey:
        """The ranks, and whether their tensors should differ."""
        return self.ranks, self.distinct


class ReplicaMessage(msgspec.Struct, frozen=True, array_like=True):
    """The digests that a rank sends in a step."""

    step: int
    groups: tuple[GroupDigests, ...]


class UnequalTensor(NamedTuple):
    """A tensor in which several elements differ, and a rank of each side."""

    layout: ReplicaLayout
    right: int
    wrong: int


class ReplicaVote:
    """Compares the replicas of one group of ranks, step by step.

    Tensors of which it is not certain that they are replicas are compared if all tensors of their
    module were equal when they were first seen. `unequal` are those of the last step in which more
    than one element differs.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.unequal: list[UnequalTensor] = []
        self._seen: set[_Tensor] = set()
        self._seen_layouts: set[str] = set()
        self._ignored: set[str] = set()  # modules whose tensors are not replicas
        self._reported: dict[_Tensor, frozenset[int]] = {}  # who differed in the last step

    def compare(
        self,
        step: int,
        digests: Mapping[int, GroupDigests],
        layouts: Mapping[str, Sequence[ReplicaLayout]],
    ) -> list[Alert]:
        """Return alerts for the tensors that have begun to differ in this step, by rank."""
        self.unequal = []
        if len({(each.layout, each.sums) for each in digests.values()}) < 2:
            self._reported.clear()
            for name in {each.layout for each in digests.values()} - self._seen_layouts:
                self._seen_layouts.add(name)
                self._seen.update((each.kind, each.name) for each in layouts[name])
            return []
        found: dict[_Tensor, dict[int, tuple[bytes, ReplicaLayout]]] = {}
        for rank, sent in digests.items():
            for i, each in enumerate(layouts[sent.layout]):
                sums = sent.sums[i * _SUMS : (i + 1) * _SUMS]
                found.setdefault((each.kind, each.name), {})[rank] = sums, each
        unequal = {
            tensor: by_rank
            for tensor, by_rank in found.items()
            if len({(sums, each.dtype, each.shape) for sums, each in by_rank.values()}) > 1
        }
        for tensor, by_rank in unequal.items():
            layout = next(iter(by_rank.values()))[1]
            if tensor not in self._seen and not layout.certain:
                self._ignored.add(layout.module)
        self._seen.update(found)
        return self._alerts(step, unequal)

    def _alerts(
        self, step: int, unequal: dict[_Tensor, dict[int, tuple[bytes, ReplicaLayout]]]
    ) -> list[Alert]:
        reported: dict[_Tensor, frozenset[int]] = {}
        alerts: list[Alert] = []
        for tensor, by_rank in unequal.items():
            layout = next(iter(by_rank.values()))[1]
            if not layout.certain and layout.module in self._ignored:
                continue
            sides = _sides({rank: sums for rank, (sums, _) in by_rank.items()})
            outvoted = frozenset(rank for side in sides[1:] for rank in side)
            reported[tensor] = outvoted
            if self._reported.get(tensor) == outvoted:
                continue
            if len(alerts) < _MOST:
                alerts.append(_alert(step, by_rank, sides))
                if "element" not in alerts[-1].facts:
                    right, wrong = sides[0][0], sides[1][0]
                    self.unequal.append(UnequalTensor(by_rank[wrong][1], right, wrong))
        self._reported = reported
        hidden = len(reported) - len(alerts)
        if len(alerts) == _MOST and hidden:
            more = f"{alerts[-1].message}; so do {hidden:,} more tensors"
            alerts[-1] = msgspec.structs.replace(alerts[-1], message=more)
        return alerts


class BatchVote:
    """Finds data-parallel ranks that are called with the same batches.

    A batch that stays the same from check to check is no mistake: somebody fits the model to it.
    """

    unequal: Sequence[UnequalTensor] = ()

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._last: dict[int, bytes] = {}
        self._same: set[int] = set()  # ranks that had the same batch in each check since then
        self._since = self._count = 0

    def compare(
        self,
        step: int,
        digests: Mapping[int, GroupDigests],
        layouts: Mapping[str, Sequence[ReplicaLayout]],
    ) -> list[Alert]:
        """Return an alert if several ranks have had the same batch in 3 checks in a row."""
        sent = {rank: each.layout.encode() + each.sums for rank, each in digests.items()}
        same = set(_sides(sent)[0])
        is_new = all(self._last.get(rank) != sent[rank] for rank in same)
        self._last = sent
        if self._count and len(same & self._same) > 1 and is_new:
            self._same &= same
            self._count += 1
        else:
            self._same, self._since, self._count = same, step, int(len(same) > 1)
        if self._count != _CHECKS:
            return []
        ranks = sorted(self._same)
        who = f"all {len(ranks)} ranks" if len(ranks) == len(self.ranks) else _ranks(ranks)
        message = (
            f"{who} have been called with the same batches since step {self._since:,}, and compute "
            "the same gradients: give each rank its own part of the data, with DistributedSampler "
            "or a seed that depends on the rank"
        )
        name = layouts[digests[ranks[0]].layout][0].name
        facts: dict[str, float] = {"ranks": len(self.ranks), "same": len(ranks)}
        return [
            Alert("identical_batches", name, Kind.VALUE, step, ranks[0], "", message, facts=facts)
        ]


def vote_of(group: GroupKey) -> ReplicaVote | BatchVote:
    """Return a new vote for a group of ranks."""
    ranks, distinct = group
    return BatchVote(ranks) if distinct else ReplicaVote(ranks)


def _sides(sums: Mapping[int, bytes]) -> list[list[int]]:
    """Return the ranks that agree with each other, the largest side first."""
    sides: dict[bytes, list[int]] = collections.defaultdict(list)
    for rank in sorted(sums):
        sides[sums[rank]].append(rank)
    return sorted(sides.values(), key=lambda side: (-len(side), side))


def _alert(
    step: int, by_rank: dict[int, tuple[bytes, ReplicaLayout]], sides: list[list[int]]
) -> Alert:
    outvoted = [rank for side in sides[1:] for rank in side]
    (right, _), (wrong, layout) = by_rank[sides[0][0]], by_rank[outvoted[0]]
    name, total = layout.name, len(by_rank)
    if len(sides[0]) * 2 > total:
        who = f"rank {outvoted[0]} has" if len(outvoted) == 1 else f"{_ranks(outvoted)} have"
        rest = total - len(outvoted)
        message = f"{who} another {name} than the other {rest:,} since step {step:,}"
    else:
        those = " and ".join(_ranks(side) for side in sides[:3])
        more = f" and {len(sides) - 3} more sides" if len(sides) > 3 else ""
        message = f"{name} differs between {those}{more} since step {step:,}, without a majority"
    detail, facts = _difference(right, wrong, layout)
    return Alert(
        "replicas", name, layout.kind, step, outvoted[0], layout.module, message + detail,
        layout.module, facts={"ranks": total, "outvoted": len(outvoted), **facts},
    )  # fmt: skip


def _difference(right: bytes, wrong: bytes, layout: ReplicaLayout) -> tuple[str, dict[str, float]]:
    """Return in which element two replicas differ, as text and as numbers."""
    whole = layout.shard.global_shape if layout.shard is not None else layout.shape
    count = 1
    for length in layout.shape:
        count *= length
    found = changed_element(
        right, wrong, layout.dtype, itemsize(layout.dtype), layout.shape, layout.shard
    )
    if found is None:
        return (f"; several of {count:,} elements differ" if count > 1 else ""), {}
    bit = "" if found.bit is None else f"bit {found.bit} of "
    flat = 0
    for length, i in zip(whole, found.at, strict=True):
        flat = flat * length + i
    facts: dict[str, float] = {"differing": 1, "element": flat}
    if found.bit is not None:
        facts["bit"] = found.bit
    where = f"element {list(found.at)}" if found.at else "its value"
    return f"; 1 of {count:,} elements differs: {bit}{where}", facts


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text.

    >>> _ranks([3]), _ranks([0, 2]), _ranks(range(9))
    ('rank 3', 'ranks 0, 2', 'ranks 0, 1, 2, 3, 4, 5 and 3 more')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 6} more" if len(ranks) > 6 else ""
    return f"ranks {', '.join(map(str, ranks[:6]))}{more}"
