"""Find where two runs begin to differ, and the tolerance at which they would agree."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from tensortap.core.record import Kind
from tensortap.rooms.compare.matching import Plan, RecordPair
from tensortap.rooms.compare.report import Difference
from tensortap.rooms.compare.result import Comparison
from tensortap.rooms.compare.rules import RuleSet
from tensortap.rooms.compare.tensors import Tolerance


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
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"{found}; on {who}, by {told_by}"


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
    if one.get("inputs") == other.get("inputs"):
        inputs = "its inputs agree, its output does not"
    else:
        inputs = "its inputs differ already"
    return f"{item.key.name}{place}: {inputs}"


def first_bitwise(judged: list[Judged], plan: Plan, rules: RuleSet | None) -> Difference | None:
    """Return the first pair in the order of execution whose bits differ, close or not.

    Its explanation names the last record before it that is identical.
    """
    for item, outcome, difference in judged:
        rule = rules.find(item.key.name, item.key.kind) if rules is not None else None
        if outcome.identical(item) or (rule is not None and rule.expected):
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


def passing_atol(judged: list[Judged], tolerance: Tolerance) -> float | None:
    """Return the smallest atol that would pass every pair with this rtol; None if none would.

    What a rule gives a tolerance of its own does not depend on it.
    """
    largest = 0.0
    for item, outcome, difference in judged:
        if difference is not None and difference.expected:
            continue
        if item.tolerance != tolerance:
            if difference is not None:
                return None
            continue
        needed = outcome.comparison.passing_atol
        if needed is None and difference is not None:
            return None
        largest = max(largest, needed or 0.0)
    return largest
