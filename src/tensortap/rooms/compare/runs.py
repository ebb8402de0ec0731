"""Compare two whole runs: where, when and on which rank they first differ."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from tensortap.core.arguments import checked
from tensortap.core.patterns import TypedPattern
from tensortap.core.rooms import offers
from tensortap.rooms.compare.compared_run import ComparedRun, whole
from tensortap.rooms.compare.first import Items, bits_differ, culprit
from tensortap.rooms.compare.matching import Choice, parse_mapping
from tensortap.rooms.compare.pairs import Sides
from tensortap.rooms.compare.provenance import provenance_diff
from tensortap.rooms.compare.report import CompareReport, Difference, Key, Missing
from tensortap.rooms.compare.rules import RuleSet, load_rules
from tensortap.rooms.compare.tasks import (
    CompareTask,
    Found,
    Judged,
    Place,
    Progress,
    run_tasks,
    split,
)
from tensortap.rooms.compare.tensors import Tolerance, check_tolerance


@checked
def compare_runs(
    a: Any,
    b: Any,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    equal_nan: bool = True,
    trust: bool = False,
    names: str | TypedPattern | None = None,
    kinds: Iterable[str] = (),
    steps: tuple[int | None, int | None] | None = None,
    ranks: Iterable[int] = (),
    mapping: Iterable[str | tuple[str, str]] = (),
    allow_missing: bool = False,
    rules: RuleSet | str | Path | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> CompareReport:
    """Compare two runs, record by record, in the order of execution."""
    check_tolerance(atol, rtol)
    rules = load_rules(rules)
    renames = [parse_mapping(each) if isinstance(each, str) else each for each in mapping]
    choice = Choice(names, tuple(kinds), steps, tuple(ranks), tuple(renames))
    tolerance = Tolerance(equal_nan=equal_nan, threads=1).given(atol, rtol)
    sides = ComparedRun(a, trust=trust), ComparedRun(b, trust=trust)
    task = CompareTask((sides[0].title, sides[1].title), choice, tolerance, rules, trust)
    found = list(run_tasks(sides, split(sides, task), executor, progress))
    judged = sorted((each for part in found for each in part.differing), key=_order)
    items: Items = {item.key: item for item, _ in judged}
    differences = [Difference(item.key, o.comparison, o.by) for item, o in judged]
    first = next(iter(differences), None)
    if first is not None:
        found_reasons = [each(sides, judged[0][0], renames) for each in offers("compare.reasons")]
        said = tuple(itertools.chain.from_iterable(found_reasons))
        first = differences[0] = dataclasses.replace(first, explanations=said)
    bitwise = min((part.bitwise for part in found if part.bitwise), key=_order, default=None)
    bits = None
    if bitwise is not None:
        bits = bits_differ(bitwise)
        items = {bits.key: bitwise[0], **items}
    text, wrong_ranks = culprit(first, items, found, bits, sides)
    lone, initial = _lone(found)
    return CompareReport(
        sides[0].title, sides[1].title, sum(part.compared for part in found),
        sum(part.equal for part in found), sum(part.by_statistics for part in found),
        tuple(differences), tuple(_missing(sides, lone)),
        sum(part.ignored for part in found) + initial, allow_missing,
        provenance_diff(sides[0].path, sides[1].path), text,
        functools.partial(_in_order, found), functools.partial(_values, sides, items),
        bits, tolerance.atol, tolerance.rtol,
        tuple(key for part in found for key in part.unplaced), wrong_ranks,
    )  # fmt: skip


def _order(judged: Judged) -> tuple[int, int, int]:
    return judged[0].order


def _lone(found: list[Found]) -> tuple[list[tuple[Key, str]], int]:
    """Return the records of one run, and how many more are initial weights of that run only."""
    lone = [each for part in found for each in part.lone]
    if all(any(part.has_initial[side] for part in found) for side in (0, 1)):
        return lone, 0
    left = [each for each in lone if each[0].step >= 0]
    return left, len(lone) - len(left)


def _missing(sides: Sides, lone: list[tuple[Key, str]]) -> Iterator[Missing]:
    """Return the records that only one run has, and whether the other dropped them."""
    if not lone:
        return
    dropped = [set(getattr(side.reader, "missing", list)()) for side in sides]
    for key, side in sorted(lone, key=lambda each: (each[0].step, each[0].name)):
        other = dropped[1] if side == "a" else dropped[0]
        yield Missing(key, side, (key.name, key.step, key.rank) in other)


def _in_order(found: list[Found]) -> dict[Place, float]:
    """Return the sizes of the differences per name, kind and step, in the order of execution."""
    rows = [
        (place[2], seq, place, size) for part in found for place, (seq, size) in part.sizes.items()
    ]
    for part in found:
        names, kinds, columns = part.identical
        for name, kind, step, seq in zip(*(each.tolist() for each in columns), strict=True):
            rows.append((step, seq, (names[name], kinds[kind], step), 0.0))
    sizes: dict[Place, float] = {}
    for _, _, place, size in sorted(rows, key=lambda row: row[:2]):
        sizes[place] = max(size, sizes.get(place, 0.0))
    return sizes


def _values(sides: Sides, items: Items, key: Key) -> tuple[Any, Any]:
    """Read both values of a difference, as they are stored; keep nothing."""
    return whole(sides[0], items[key].a), whole(sides[1], items[key].b)
