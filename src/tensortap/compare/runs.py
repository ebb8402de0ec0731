"""Compare two whole runs: where, when and on which rank they first differ."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tensortap.compare.compared_run import ComparedRun, Disagreement, RecordPart, whole
from tensortap.compare.matching import Choice, ChosenRecords, choose, pair, parse_mapping, same
from tensortap.compare.noise import Noise
from tensortap.compare.report import CompareReport, Difference, Key, Missing, Sizes
from tensortap.compare.result import Comparison
from tensortap.compare.rules import RuleSet, load_rules
from tensortap.compare.statistics import compare_statistics
from tensortap.compare.tensors import check_tolerance
from tensortap.compare.value_reader import ValueReader
from tensortap.compare.values import compare_values
from tensortap.errors import TensortapError
from tensortap.runs.pickles import UntrustedFile

_CHUNK = 64  # pairs per task
_AHEAD = 4  # waiting tasks per worker
Progress = Callable[[int, int], object]


class Tolerance(NamedTuple):
    """The tolerance of one pair."""

    atol: float = 1e-8
    rtol: float = 1e-5
    equal_nan: bool = True


class RecordPair(NamedTuple):
    """Two matching records."""

    key: Key
    seq: int
    a: list[RecordPart]
    b: list[RecordPart]
    tolerance: Tolerance


class Outcome(NamedTuple):
    """The result of comparing one pair of records."""

    comparison: Comparison
    by: str = "value"


def compare_runs(
    a: Any,
    b: Any,
    *,
    atol: float = 1e-8,
    rtol: float = 1e-5,
    equal_nan: bool = True,
    trust: bool = False,
    names: str | None = None,
    kinds: Iterable[str] = (),
    steps: tuple[int | None, int | None] | None = None,
    ranks: Iterable[int] = (),
    mapping: Iterable[str | tuple[str, str]] = (),
    allow_missing: bool = False,
    rules: RuleSet | str | Path | None = None,
    noise: tuple[Any, Any] | None = None,
    executor: concurrent.futures.Executor | None = None,
    progress: Progress | None = None,
) -> CompareReport:
    """Compare two runs, record by record, in the order of execution.

    `noise` are two runs of the code of `a`: a difference no larger than theirs does not count.
    """
    check_tolerance(atol, rtol)
    if isinstance(rules, (str, Path)):
        rules = load_rules(rules)
    sides = ComparedRun(a, trust=trust), ComparedRun(b, trust=trust)
    renames = [parse_mapping(each) if isinstance(each, str) else each for each in mapping]
    choice = Choice(names, tuple(kinds), steps, tuple(ranks), tuple(renames))
    floor = None
    if noise is not None:
        floor = _noise(noise, choice, Tolerance(atol, rtol, equal_nan), trust, executor)
    records = (
        choose(sides[0].table(), choice, rename=True),
        choose(sides[1].table(), choice, rename=False),
    )
    plan = _Plan(records, Tolerance(atol, rtol, equal_nan), rules)
    outcomes = _run(sides, plan.items, executor, progress)
    differences = []
    worst: dict[tuple[str, str, int], tuple[int, float]] = {}
    by_statistics = 0
    for item, outcome in zip(plan.items, outcomes, strict=True):
        found = outcome.comparison
        by_statistics += outcome.by == "statistics"
        place = item.key.name, item.key.kind, item.key.step
        size = found.rel_l2 if found.rel_l2 is not None else found.max_rel
        seq, before = worst.get(place, (item.seq, 0.0))
        worst[place] = min(seq, item.seq), max(before, size, 0.0 if found else 1e-300)
        difference = _judged(item, outcome, rules, floor)
        if difference is not None:
            differences.append(difference)
    differences.sort(key=plan.order)
    from tensortap.compare.origin import culprit_of
    from tensortap.compare.provenance import provenance_diff

    return CompareReport(
        sides[0].title, sides[1].title, plan.compared, plan.equal, by_statistics,
        tuple(_explained(differences, sides, plan)), tuple(plan.missing(sides)), plan.ignored,
        allow_missing, provenance_diff(sides[0].path, sides[1].path),
        culprit_of(differences, plan), Sizes(worst, plan.calm),
        ValueReader(sides, {d.key: plan.parts(d.key) for d in differences}),
    )  # fmt: skip


def _noise(
    runs: tuple[Any, Any],
    choice: Choice,
    tolerance: Tolerance,
    trust: bool,
    executor: concurrent.futures.Executor | None,
) -> Noise:
    """Return the differences between two runs of the same code."""
    sides = ComparedRun(runs[0], trust=trust), ComparedRun(runs[1], trust=trust)
    records = (
        choose(sides[0].table(), choice, rename=True),
        choose(sides[1].table(), choice, rename=True),
    )
    plan = _Plan(records, tolerance, None)
    return Noise(zip(plan.items, _run(sides, plan.items, executor, None), strict=True))


def _judged(
    item: RecordPair, outcome: Outcome, rules: RuleSet | None, noise: Noise | None
) -> Difference | None:
    rule = rules.find(item.key.name, item.key.kind) if rules is not None else None
    if rule is None or rule.condition is None:
        passed = bool(outcome.comparison)
    else:
        passed = bool(outcome.comparison) or rule.condition.holds(outcome.comparison)
    if passed or (noise is not None and noise.covers(item.key, outcome.comparison)):
        return None
    expected = rule.expected if rule is not None else ""
    said = str(rule.condition) if rule is not None and rule.condition is not None else ""
    return Difference(item.key, outcome.comparison, outcome.by, (), expected, said)


def _explained(
    differences: list[Difference], sides: tuple[ComparedRun, ComparedRun], plan: _Plan
) -> Iterator[Difference]:
    """Return the differences with explanations added to the first one."""
    import dataclasses

    from tensortap.compare.explain import explain

    for number, difference in enumerate(differences):
        if number or difference.by != "value":
            yield difference
            continue
        item = plan.item(difference.key)
        try:
            values = [
                whole(side, parts) for side, parts in zip(sides, (item.a, item.b), strict=True)
            ]
            before = [
                None if parts is None else whole(side, parts)
                for side, parts in zip(sides, plan.before(difference.key), strict=True)
            ]
        except (Disagreement, TensortapError):
            yield difference
            continue
        tolerance = item.tolerance
        found = explain(
            *values, atol=tolerance.atol, rtol=tolerance.rtol,
            previous_a=before[0], previous_b=before[1],
        )  # fmt: skip
        yield dataclasses.replace(difference, explanations=tuple(map(str, found)))


# -- what is compared with what ------------------------------------------------------------


class _Plan:
    """The pairs of two runs, and what is known about them without reading values."""

    def __init__(
        self,
        records: tuple[ChosenRecords, ChosenRecords],
        tolerance: Tolerance,
        rules: RuleSet | None,
    ) -> None:
        self._records = records
        self._tolerance = tolerance
        self._rules = rules
        self.ignored = 0
        self.items: list[RecordPair] = []
        self._seqs: dict[Key, int] = {}
        self._lone: list[tuple[Key, str]] = []
        shards = [each.shards() for each in records]
        groups = {
            at: [
                group[at] if at in group else each.rows_at(*at)
                for each, group in zip(records, shards, strict=True)
            ]
            for at in {**shards[0], **shards[1]}
        }
        self._pair_sharded(groups)
        a, b = (
            each._replace(rows=np.setdiff1d(each.rows, np.concatenate(found), assume_unique=True))
            if (found := [group[i] for group in groups.values()])
            else each
            for i, each in enumerate(records)
        )
        self._pair_plain(a, b)
        self.items.sort(key=lambda item: (item.key.step, item.seq, item.key.rank))
        self._by_key = {item.key: item for item in self.items}
        self.compared = self.equal + len(self.items)

    def _pair_plain(self, a: ChosenRecords, b: ChosenRecords) -> None:
        pairs = pair(a, b)
        equal = same(a, b, pairs, equal_nan=self._tolerance.equal_nan)
        self.calm = a.captures(pairs.a[equal])
        self.equal = int(equal.sum())
        rows = pairs.a[~equal]
        found = a.keys(rows), a.table.seq[rows].tolist(), a.parts(rows), b.parts(pairs.b[~equal])
        for key, seq, one, other in zip(*found, strict=True):
            self._add(key, seq, [one], [other])
        for each, lone, side in ((a, pairs.only_a, "a"), (b, pairs.only_b, "b")):
            for key in each.keys(lone):
                self._lose(key, side)

    def _pair_sharded(self, groups: dict[tuple[str, str, int, int], list[Any]]) -> None:
        for at, (rows_a, rows_b) in groups.items():
            key = Key(*at, -1)
            if not len(rows_a) or not len(rows_b):
                self._lose(key, "a" if len(rows_a) else "b")
                continue
            a, b = self._records
            self._add(key, int(a.table.seq[rows_a[0]]), a.parts(rows_a), b.parts(rows_b))

    def _add(self, key: Key, seq: int, a: list[RecordPart], b: list[RecordPart]) -> None:
        rule = self._rules.find(key.name, key.kind) if self._rules is not None else None
        if rule is not None and rule.ignore:
            self.ignored += 1
            return
        tolerance = self._tolerance
        if rule is not None:
            tolerance = tolerance._replace(
                atol=tolerance.atol if rule.atol is None else rule.atol,
                rtol=tolerance.rtol if rule.rtol is None else rule.rtol,
            )
        self._seqs[key] = seq
        self.items.append(RecordPair(key, seq, a, b, tolerance))

    def _lose(self, key: Key, side: str) -> None:
        rule = self._rules.find(key.name, key.kind) if self._rules is not None else None
        if rule is not None and (rule.ignore or rule.expected):
            self.ignored += 1
            return
        self._lone.append((key, side))

    def order(self, difference: Difference) -> tuple[int, int, int]:
        """Return the position of a difference in the execution of the first run."""
        key = difference.key
        return key.step, self._seqs[key], key.rank

    def item(self, key: Key) -> RecordPair:
        """Return the pair of records of a key."""
        return self._by_key[key]

    def parts(self, key: Key) -> tuple[list[RecordPart], list[RecordPart]]:
        """Return the records that hold the two values of a key."""
        item = self._by_key[key]
        return item.a, item.b

    def before(self, key: Key) -> tuple[list[RecordPart] | None, list[RecordPart] | None]:
        """Return the same tensor one step earlier, from both runs, if they have it."""
        found = []
        for records in self._records:
            rows = records.rows_at(key.name, key.kind, key.step - 1, key.call)
            if key.rank >= 0:
                rows = rows[records.table.rank[rows] == key.rank]
            found.append(records.parts(rows) or None)
        return found[0], found[1]

    def missing(self, sides: tuple[ComparedRun, ComparedRun]) -> Iterator[Missing]:
        """Return the records that only one run has, and whether the other dropped them."""
        if not self._lone:
            return
        dropped = [
            set(side.reader.missing()) if hasattr(side.reader, "missing") else set()
            for side in sides
        ]
        for key, side in sorted(self._lone, key=lambda lone: (lone[0].step, lone[0].name)):
            other = dropped[1] if side == "a" else dropped[0]
            yield Missing(key, side, (key.name, key.step, key.rank) in other)


# -- comparing -----------------------------------------------------------------------------


def _run(
    sides: tuple[ComparedRun, ComparedRun],
    items: list[RecordPair],
    executor: concurrent.futures.Executor | None,
    progress: Progress | None,
) -> list[Outcome]:
    """Yield the outcomes of all pairs in order, with a bounded number of waiting tasks."""
    chunks = [items[i : i + _CHUNK] for i in range(0, len(items), _CHUNK)]
    found: list[list[Outcome]] = []
    own = None
    if executor is None:
        workers = max(1, min(8, len(os.sched_getaffinity(0)), len(chunks)))
        executor = own = concurrent.futures.ThreadPoolExecutor(workers)
    waiting: list[Any] = []
    limit = _AHEAD * (getattr(executor, "_max_workers", None) or 8)
    done = 0
    try:
        for chunk in [*chunks, None]:
            if chunk is not None:
                waiting.append(executor.submit(compare_chunk, sides, chunk))
            while waiting and (chunk is None or len(waiting) >= limit):
                found.append(waiting.pop(0).result())
                done += len(found[-1])
                if progress is not None:
                    progress(done, len(items))
    finally:
        if own is not None:
            own.shutdown(wait=True, cancel_futures=True)
    return [outcome for outcomes in found for outcome in outcomes]


def compare_chunk(sides: tuple[ComparedRun, ComparedRun], items: list[RecordPair]) -> list[Outcome]:
    """Compare some pairs, in this or another process."""
    return [_compare(sides, item) for item in items]


def _compare(sides: tuple[ComparedRun, ComparedRun], item: RecordPair) -> Outcome:
    tolerance = item.tolerance
    held = [all(part.has_value for part in parts) for parts in (item.a, item.b)]
    if not all(held):
        return Outcome(compare_statistics(sides, item.a, item.b, tolerance), "statistics")
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
        return Outcome(compare_statistics(sides, item.a, item.b, tolerance), "statistics")
    found = compare_values(
        a, b, atol=tolerance.atol, rtol=tolerance.rtol, equal_nan=tolerance.equal_nan, threads=1
    )
    return Outcome(found)


def _same_bytes(sides: tuple[ComparedRun, ComparedRun], item: RecordPair) -> bool:
    """Return whether a pair of dumped objects has files with equal bytes."""
    if len(item.a) != 1 or len(item.b) != 1:
        return False
    files = [side.file(parts[0]) for side, parts in zip(sides, (item.a, item.b), strict=True)]
    return None not in files and files[0].read_bytes() == files[1].read_bytes()  # type: ignore[union-attr]
