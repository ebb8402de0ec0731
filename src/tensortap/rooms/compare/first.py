"""Find where two runs begin to differ, on which ranks, and the tolerance that would pass."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from tensortap.core.errors import TensortapError
from tensortap.core.record import Kind
from tensortap.rooms.compare.compared_run import ComparedRun, RecordPart, batch_of, part_of, whole
from tensortap.rooms.compare.matching import Plan, RecordPair
from tensortap.rooms.compare.report import Difference
from tensortap.rooms.compare.result import Comparison
from tensortap.rooms.compare.rules import RuleSet
from tensortap.rooms.compare.values import compare_with
from tensortap.runs.assemble import Disagreement


class Outcome(NamedTuple):
    """The result of comparing one pair of records."""

    comparison: Comparison
    by: str = "value"

    @property
    def size(self) -> float:
        """The relative size of the difference."""
        found = self.comparison
        return found.max_rel if found.rel_l2 is None else found.rel_l2

    def identical(self, item: RecordPair) -> bool:
        """Return whether both values have the same bits, as far as the runs tell."""
        one, other = (parts[0].record for parts in (item.a, item.b))
        if len(item.a) == len(item.b) == 1 and one.digest and other.digest:
            return one.digest == other.digest and one.dtype == other.dtype
        found = self.comparison
        return found.equal and not found.max_abs and not found.mismatches


Judged = tuple[RecordPair, Outcome, Difference | None]
Sides = tuple[ComparedRun, ComparedRun]
Compare = Callable[[Sides, RecordPair], Outcome]


def culprit(
    differences: list[Difference],
    plan: Plan,
    bitwise: Difference | None,
    ranks: tuple[int, ...] = (),
    told_by: str = "",
) -> str:
    """Return a sentence on the origin of the first difference; empty if there is none.

    `ranks` are those whose part of the tensor `told_by` is wrong, if that is known.
    """
    found = _origin(differences, plan, bitwise)
    if not ranks or not found:
        return found
    plural = "s" if len(ranks) > 1 else ""
    return f"{found}; on rank{plural} {', '.join(map(str, ranks))}, by {told_by}"


def _origin(differences: list[Difference], plan: Plan, bitwise: Difference | None) -> str:
    """Return where the first difference came from, in words.

    Records are in the order of execution: if the first that differs is the output of a module,
    everything that it was computed from agrees.
    """
    first = next((d for d in differences if not d.expected), None)
    if first is None:
        return ""
    name, kind, step = first.key.name, first.key.kind, first.key.step
    # other ranks add up in another order, which changes the last bits
    same_ranks = plan.records[0].table.ranks() == plan.records[1].table.ranks()
    if bitwise is not None and same_ranks and plan.order(bitwise) < plan.order(first):
        place = f"{bitwise.key.name} ({bitwise.key.kind}) at step {bitwise.key.step}"
        if bitwise.key.kind == Kind.OP.value:
            place = f"{_operation(plan.by_key[bitwise.key])}, at step {bitwise.key.step}"
        return f"culprit: probably {place}, whose bits differ first; {name} exceeds the tolerance"
    if kind == Kind.OP.value:
        return f"culprit: {_operation(plan.by_key[first.key])}"
    if kind == Kind.ACTIVATION.value:
        seq = plan.by_key[first.key].seq
        if plan.equal or any(
            item.key.kind == kind and (item.key.step, item.seq) < (step, seq) for item in plan.items
        ):
            return f"culprit: {name}: everything before it agrees, its output does not"
        return f"{name} is the first recorded output"
    if kind == Kind.GRADIENT.value:
        return f"culprit: the backward pass behind {name}; all outputs agree until then"
    if kind in (Kind.WEIGHT.value, Kind.WEIGHT_GRADIENT.value, Kind.OPTIMISER_STATE.value):
        return f"culprit: {name} ({kind}) differs before any output does"
    return ""


def _operation(item: RecordPair) -> str:
    """Return an operation in words: its name, its lines, and whether its inputs agree."""
    one, other = (parts[0].record.tags for parts in (item.a, item.b))
    lines = [tags.get("line", "") for tags in (one, other)]
    place = f" at {lines[0]}" if lines[0] else ""
    if lines[1] and lines[1] != lines[0]:
        place += f" (in B {lines[1]})"
    agree = one.get("inputs") == other.get("inputs")
    inputs = "its inputs agree, its output does not" if agree else "its inputs differ already"
    return f"{item.key.name}{place}: {inputs}"


def first_bitwise(judged: list[Judged], plan: Plan, rules: RuleSet) -> Difference | None:
    """Return the first pair in the order of execution whose bits differ, close or not.

    Its explanation names the last record before it that is identical.
    """
    for item, outcome, difference in judged:
        if outcome.identical(item) or rules.find(item.key.name, item.key.kind).expected:
            continue
        found = difference or Difference(item.key, outcome.comparison, outcome.by)
        explanations = [_last_identical(item, plan)]
        if item.key.kind == Kind.OP.value:
            explanations.insert(0, _operation(item))
        return dataclasses.replace(found, explanations=tuple(explanations))
    return None


def _last_identical(item: RecordPair, plan: Plan) -> str:
    """Return in words which record of the same kind and rank came last before a pair."""
    chosen, rows = plan.records[plan.ordered_by], plan.equal_rows
    table, (step, rank) = chosen.table, (item.key.step, max(item.key.rank, 0))
    before = (table.step[rows] < step) | ((table.step[rows] == step) & (table.seq[rows] < item.seq))
    same = [table.kinds[kind] == item.key.kind for kind in range(len(table.kinds))]
    rows = rows[before & (table.rank[rows] == rank) & np.array(same)[table.kind[rows]]]
    if not len(rows):
        return f"no {item.key.kind} before it was compared"
    last = rows[np.lexsort((table.seq[rows], table.step[rows]))[-1]]
    name, at = chosen.names[table.name[last]], int(table.step[last])
    return f"last identical: {name}" + (f" at step {at}" if at != step else "")


# -- ranks -----------------------------------------------------------------------------------


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
        each for each in found
        if (each.key.kind, each.key.step) == (Kind.WEIGHT.value, first.step)
        and each.key.name.startswith(f"{first.name}.")
    ]  # fmt: skip
    for each, mine in itertools.product((*weights, found[0]), (0, 1)):
        if len(plan.records[mine].table.ranks()) < 2:
            continue
        sizes = _sizes(plan.by_key[each.key], mine, sides, compare)
        # the largest and those half as large: the weights of all ranks differ after a step
        limit = max(sizes.values(), default=0.0) / 2
        ranks = tuple(sorted(rank for rank, size in sizes.items() if limit and size >= limit))
        if ranks and (len(ranks) < len(sizes) or len(sizes) == 1):
            return ranks, each.key.name
    return (), ""


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
    same = [other for other in others if _part_place(other) == _part_place(part)]
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


def _part_place(part: RecordPart) -> Any:
    """Return the part of the whole that a record is, as both runs spell it."""
    record = part.record
    if record.shard is None:
        return record.shape, (0,) * len(record.shape)
    return record.shape, record.shard.offsets
