"""Compare two whole runs: where, when and on which rank they first differ."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import filecmp
import functools
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tensortap.core.arguments import checked
from tensortap.core.errors import TensortapError, UntrustedFile
from tensortap.core.patterns import TypedPattern
from tensortap.core.record import Summary, TensorData
from tensortap.rooms.compare.compared_run import ComparedRun, RecordPart, batch_of, whole
from tensortap.rooms.compare.explain import explain
from tensortap.rooms.compare.first import (
    Outcome,
    Sides,
    culprit,
    faulty_ranks,
    first_bitwise,
)
from tensortap.rooms.compare.matching import (
    Choice,
    Plan,
    RecordPair,
    choose,
    parse_mapping,
)
from tensortap.rooms.compare.provenance import provenance_diff
from tensortap.rooms.compare.report import CompareReport, Difference, Key
from tensortap.rooms.compare.result import Comparison
from tensortap.rooms.compare.rules import RuleSet, load_rules
from tensortap.rooms.compare.tensors import Tolerance, check_tolerance, nudged
from tensortap.rooms.compare.values import compare_with
from tensortap.runs.assemble import Disagreement
from tensortap.stats import summarize_array
from tensortap.stats.merge import merge
from tensortap.stats.shard_digest import add_digests, is_shard_digest
from tensortap.values.view import as_numpy

_CHUNK = 64  # pairs per task
_COUNTS = ("count", "nans", "posinfs", "neginfs")
_FIGURES = ("min", "max", "mean", "std", "mean_abs", "max_abs", "min_abs", "rm2", "rm4", "rm8")
Progress = Callable[[int, int], object]


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
    progress: Progress | None = None,
) -> CompareReport:
    """Compare two runs, record by record, in the order of execution."""
    check_tolerance(atol, rtol)
    rules = load_rules(rules)
    renames = [parse_mapping(each) if isinstance(each, str) else each for each in mapping]
    choice = Choice(names, tuple(kinds), steps, tuple(ranks), tuple(renames))
    tolerance = Tolerance(equal_nan=equal_nan, threads=1).given(atol, rtol)
    sides = ComparedRun(a, trust=trust), ComparedRun(b, trust=trust)
    records = (
        choose(sides[0].table(), choice, rename=True),
        choose(sides[1].table(), choice, rename=False),
    )
    plan = Plan(records, tolerance, rules)
    outcomes = _run(sides, plan.items, progress)
    differences = []
    judged = []
    sizes: dict[tuple[str, str, int], tuple[int, float]] = {}
    for item, outcome in zip(plan.items, outcomes, strict=True):
        place = item.key.name, item.key.kind, item.key.step
        seq, size = sizes.get(place, (item.seq, 0.0))
        least = 0.0 if outcome.comparison else 1e-300
        sizes[place] = min(seq, item.seq), max(size, outcome.size, least)
        difference = None
        if not outcome.comparison:
            expected = rules.find(item.key.name, item.key.kind).expected
            difference = Difference(item.key, outcome.comparison, outcome.by, (), expected)
        judged.append((item, outcome, difference))
        if difference is not None:
            differences.append(difference)
    differences.sort(key=plan.order)
    if differences and differences[0].by == "value":
        differences[0] = _explained(differences[0], sides, plan)
    bitwise = first_bitwise(judged, plan, rules)
    ranks, told_by = faulty_ranks(differences, plan, sides, _compare)
    ordered = plan.records[plan.ordered_by]
    table, rows = ordered.table, np.concatenate([plan.equal_rows, plan.shard_rows])
    columns = [column[rows] for column in (table.name, table.kind, table.step, table.seq)]
    equal = ordered.names, table.kinds, columns
    return CompareReport(
        sides[0].title, sides[1].title, plan.compared, plan.equal,
        sum(outcome.by == "statistics" for outcome in outcomes) + plan.equal_shards,
        tuple(differences), tuple(plan.missing(sides)), plan.ignored,
        allow_missing, provenance_diff(sides[0].path, sides[1].path),
        culprit(differences, plan, bitwise, ranks, told_by),
        functools.partial(_in_order, sizes, equal),
        functools.partial(_values, sides, {d.key: plan.by_key[d.key] for d in differences}),
        bitwise, tolerance.atol, tolerance.rtol,
        tuple(plan.unplaced), ranks,
    )  # fmt: skip


def _explained(first: Difference, sides: Sides, plan: Plan) -> Difference:
    """Return the first difference with its explanations."""
    item = plan.by_key[first.key]
    try:
        a, b = whole(sides[0], item.a), whole(sides[1], item.b)
    except (Disagreement, TensortapError):
        return first
    atol, rtol, *_ = item.tolerance
    found = explain(a, b, atol=atol, rtol=rtol)
    return dataclasses.replace(first, explanations=tuple(map(str, found)))


def _in_order(
    found: dict[tuple[str, str, int], tuple[int, float]],
    equal: tuple[list[str], list[str], list[Any]],
) -> dict[tuple[str, str, int], float]:
    """Return the sizes of the differences per name, kind and step, in the order of execution."""
    rows = [(place[2], seq, place, size) for place, (seq, size) in found.items()]
    names, kinds, columns = equal
    for name, kind, step, seq in zip(*(column.tolist() for column in columns), strict=True):
        rows.append((step, seq, (names[name], kinds[kind], step), 0.0))
    sizes: dict[tuple[str, str, int], float] = {}
    for _, _, place, size in sorted(rows, key=lambda row: row[:2]):
        sizes[place] = max(size, sizes.get(place, 0.0))
    return sizes


def _values(sides: Sides, items: dict[Key, RecordPair], key: Key) -> tuple[Any, Any]:
    """Read both values of a difference, as they are stored; keep nothing."""
    return whole(sides[0], items[key].a), whole(sides[1], items[key].b)


# -- comparing -----------------------------------------------------------------------------


def _run(sides: Sides, items: list[RecordPair], progress: Progress | None) -> list[Outcome]:
    """Return the outcomes of all pairs, in order."""

    def compare_chunk(start: int) -> list[Outcome]:
        return [_compare(sides, item) for item in items[start : start + _CHUNK]]

    outcomes: list[Outcome] = []
    executor = concurrent.futures.ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))))
    try:
        for found in executor.map(compare_chunk, range(0, len(items), _CHUNK)):
            outcomes += found
            if progress is not None:
                progress(len(outcomes), len(items))
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
    return outcomes


def _compare(sides: Sides, item: RecordPair) -> Outcome:
    tolerance = item.tolerance
    held = [all(part.has_value for part in parts) for parts in (item.a, item.b)]
    batches = [{batch_of(part.record) for part in parts} for parts in (item.a, item.b)]
    # parts of a batch may be in any order, which does not matter to statistics
    has_parts = max(map(len, batches)) > 1
    if not all(held) or has_parts:
        same = _same_digests(item) if tolerance.equal_nan and not has_parts else None
        if same:
            return Outcome(Comparison(True, notes=("by digest",)))
        if same is False and not (tolerance.atol or tolerance.rtol):
            return Outcome(Comparison(False, "the bits differ, by digest", differing=1), "digest")
        return Outcome(_compare_statistics(sides, item.a, item.b, tolerance), "statistics")
    try:
        a, b = whole(sides[0], item.a), whole(sides[1], item.b)
    except Disagreement as error:
        return Outcome(Comparison(False, str(error), differing=1))
    except UntrustedFile as error:  # one unreadable object must not end the comparison
        if _same_bytes(sides, item):
            return Outcome(Comparison(True, notes=("not read: the files have equal bytes",)))
        return Outcome(Comparison(False, str(error), differing=1))
    if a is None and b is None and item.a[0].record.stats is not None:
        # a live session reveals only now that it has no value
        return Outcome(_compare_statistics(sides, item.a, item.b, tolerance), "statistics")
    return Outcome(compare_with(a, b, tolerance))


def _same_bytes(sides: Sides, item: RecordPair) -> bool:
    """Return whether a pair of dumped objects has files with equal bytes."""
    if len(item.a) != 1 or len(item.b) != 1:
        return False
    a, b = sides[0].file(item.a[0]), sides[1].file(item.b[0])
    # a pipe equals nothing
    return a is not None and b is not None and filecmp.cmp(a, b, shallow=False)


def _same_digests(item: RecordPair) -> bool | None:
    """Return whether both tensors have the same bits; None if their digests do not tell."""
    totals = []
    for parts in (item.a, item.b):
        found: dict[Any, tuple[int, bytes]] = {}  # by place: replicas count once
        for part in parts:
            record = part.record
            if record.digest is None or not is_shard_digest(record.digest):
                return None
            place = record.shard.offsets if record.shard is not None else None
            size = math.prod(record.shape)
            if found.setdefault(place, (size, record.digest)) != (size, record.digest):
                return None  # replicas differ
        shard = parts[0].record.shard
        whole = math.prod(shard.global_shape if shard is not None else parts[0].record.shape)
        if sum(size for size, _ in found.values()) != whole:
            return None  # shards are missing
        totals.append(add_digests(digest for _, digest in found.values()))
    return totals[0] == totals[1]


def _compare_statistics(
    sides: Sides,
    a: list[RecordPart],
    b: list[RecordPart],
    tolerance: Tolerance,
) -> Comparison:
    """Compare statistics: counts exactly, figures within the tolerance.

    The tolerance of the mean is relative to the values, because the mean may be near zero. What
    differs in the numbers of NaN and infinities is `nonfinite`, as no figure measures it.
    """
    try:
        found = [_summary(side, parts) for side, parts in zip(sides, (a, b), strict=True)]
    except Disagreement as error:
        return Comparison(False, str(error), notes=("by statistics",), differing=1)
    if found[0] is None or found[1] is None:
        return Comparison(False, "nothing to compare: neither value nor statistics", differing=1)
    one, other = found[0], found[1]
    max_abs = max_rel = 0.0
    differ = []
    nonfinite = 0
    excess: float | None = 0.0
    for name in _COUNTS:
        x, y = getattr(one, name), getattr(other, name)
        if x != y:
            differ.append(f"{name} {x:,} and {y:,}")
            nonfinite += abs(x - y) if name != "count" else 0
            excess = None
    for name in _FIGURES:
        x, y = getattr(one, name), getattr(other, name)
        if math.isnan(x) and math.isnan(y):
            continue
        scale = max(abs(other.mean_abs), abs(y)) if name in ("mean", "std") else abs(y)
        size = abs(x - y)
        max_abs = max(max_abs, size)
        max_rel = max(max_rel, size / scale if scale else (math.inf if size else 0.0))
        if excess is not None:
            excess = max(excess, size - tolerance.rtol * scale)
        if not size <= tolerance.atol + tolerance.rtol * scale:
            differ.append(f"{name} {x:.6g} and {y:.6g}")
    return Comparison(
        not differ, f"statistics differ: {', '.join(differ[:3])}" if differ else "",
        notes=("by statistics",), count=one.count, nonfinite=nonfinite, max_abs=max_abs,
        max_rel=max_rel, differing=int(bool(differ)), passing_atol=excess and nudged(excess),
    )  # fmt: skip


def _summary(side: ComparedRun, parts: list[RecordPart]) -> Summary | None:
    """Return the statistics of a tensor, merged over its shards; replicas count once."""
    found: dict[Any, tuple[int, Summary]] = {}
    for part in parts:
        stats = part.record.stats
        if stats is None:
            value = side.value(part)
            if not isinstance(value, TensorData):
                return None
            stats = summarize_array(as_numpy(value))
        record = part.record
        place: Any = (record.shape, record.shard.offsets) if record.shard is not None else None
        if len(parts) > 1:
            place = batch_of(record), place
        rank, known = found.setdefault(place, (record.rank, stats))
        if repr(known) != repr(stats):  # NaN does not equal itself
            raise Disagreement(f"the replicas of ranks {rank} and {record.rank} differ")
    summaries = [stats for _, stats in found.values()]
    return summaries[0] if len(summaries) == 1 else merge(*summaries)
