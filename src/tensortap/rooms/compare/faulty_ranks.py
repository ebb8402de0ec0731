"""Find the ranks that hold a difference between two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tensortap.core.errors import TensortapError
from tensortap.core.record import Kind
from tensortap.rooms.compare.compared_run import ComparedRun, RecordPart, batch_of, part_of, whole
from tensortap.rooms.compare.first import Outcome
from tensortap.rooms.compare.matching import Plan, RecordPair
from tensortap.rooms.compare.report import Difference
from tensortap.rooms.compare.values import compare_with
from tensortap.runs.assemble import Disagreement

Sides = tuple[ComparedRun, ComparedRun]
Compare = Callable[[Sides, RecordPair], Outcome]
_NEAR = (
    0.5  # times the largest difference is as large: the weights of all ranks differ after a step
)


def faulty_ranks(
    differences: Iterable[Difference], plan: Plan, sides: Sides, compare: Compare
) -> tuple[tuple[int, ...], str]:
    """Return the ranks whose part of the first difference is wrong, and the tensor that tells.

    If it is the output of a module, the weights of the module tell more: a wrong weight of one
    rank makes the output of all ranks wrong. Without ranks, nobody can tell, or all differ alike.
    """
    found = [each for each in differences if not each.expected]
    if not found:
        return (), ""
    first = found[0].key
    weights = [
        each
        for each in found
        if each.key.kind == Kind.WEIGHT.value
        and each.key.step == first.step
        and each.key.name.startswith(f"{first.name}.")
    ]
    for each in (*weights, found[0]):
        item = plan.by_key[each.key]
        for mine in (0, 1):
            if len(plan.records[mine].table.ranks()) > 1:
                ranks = _largest(_sizes(item, mine, sides, compare))
                if ranks:
                    return ranks, each.key.name
    return (), ""


def _largest(sizes: dict[int, float]) -> tuple[int, ...]:
    limit = max(sizes.values(), default=0.0) * _NEAR
    ranks = tuple(sorted(rank for rank, size in sizes.items() if limit and size >= limit))
    return ranks if len(ranks) < len(sizes) or len(sizes) == 1 else ()


def _sizes(item: RecordPair, mine: int, sides: Sides, compare: Compare) -> dict[int, float]:
    """Return how much the part of each rank differs from the same part of the other run."""
    parts, others = (item.a, item.b) if mine == 0 else (item.b, item.a)
    sizes: dict[int, float] = {}
    if len({batch_of(part.record) for part in parts}) > 1:
        return sizes  # which rows of the other run a rank has is not known
    for part in parts:
        size = _size(item, part, others, mine, sides, compare)
        if size is None:
            return {}
        rank = part.record.rank
        sizes[rank] = max(size, sizes.get(rank, 0.0))
    return sizes


def _size(
    item: RecordPair, part: RecordPart, others: list[RecordPart], mine: int, sides: Sides,
    compare: Compare,
) -> float | None:  # fmt: skip
    same = [other for other in others if _place(other) == _place(part)]
    try:
        if same:
            pair = [[part], same[:1]] if mine == 0 else [same[:1], [part]]
            comparison = compare(sides, item._replace(a=pair[0], b=pair[1])).comparison
        elif all(each.has_value for each in (part, *others)):
            value: Any = whole(sides[1 - mine], others)
            comparison = compare_with(*part_of(sides[mine], part, value), item.tolerance)
        else:
            return None  # statistics of a whole do not tell which part differs
    except (Disagreement, TensortapError):
        return None
    if comparison.equal:
        return 0.0
    return comparison.max_abs or float(comparison.differing > 0)


def _place(part: RecordPart) -> Any:
    """Return the part of the whole that a record is, as both runs spell it."""
    record = part.record
    if record.shard is None:
        return record.shape, (0,) * len(record.shape)
    return record.shape, record.shard.offsets
