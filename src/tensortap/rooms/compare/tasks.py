"""Split a comparison into tasks that are independent, here or in processes of an executor.

The windows of two compacted runs are sorted by tensors. So a task takes some steps and tensors of
both, and nothing else has to be read for it.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tensortap.rooms.compare.compared_run import ComparedRun
from tensortap.rooms.compare.matching import (
    Choice,
    ChosenRecords,
    Integers,
    choose,
    renamed,
    wanted_tensors,
)
from tensortap.rooms.compare.pairs import Outcome, Sides, compare_pair
from tensortap.rooms.compare.plan import Plan, RecordPair
from tensortap.rooms.compare.report import Key
from tensortap.rooms.compare.rules import RuleSet
from tensortap.rooms.compare.tensors import Tolerance
from tensortap.table.numbering import codes, first_of

log = logging.getLogger("tensortap")
_ROWS = 400_000  # records of a run in a task, about 300 bytes each
_CHUNK = 64  # pairs per thread and turn
Progress = Callable[[int, int], object]
Judged = tuple[RecordPair, Outcome]
Place = tuple[str, str, int]  # name, kind, step


class CompareTask(NamedTuple):
    """A part of a comparison; small enough to send to another machine."""

    runs: tuple[str, str]  # folders or URLs
    choice: Choice
    tolerance: Tolerance
    rules: RuleSet
    trust: bool = False


class Identical(NamedTuple):
    """Records that are equal in both runs: one per name, kind and step, in any order."""

    names: list[str]
    kinds: list[str]
    columns: list[Integers]  # codes of name and kind, step, seq


class Found(NamedTuple):
    """The result of a task."""

    compared: int
    equal: int
    by_statistics: int
    ignored: int
    has_initial: list[bool]  # whether each run has weights from before the first step
    differing: list[Judged]
    bitwise: Judged | None  # the first pair whose bits differ
    sizes: dict[Place, tuple[int, float]]  # order and size of differences of pairs that were read
    identical: Identical
    lone: list[tuple[Key, str]]
    unplaced: list[Key]


def split(sides: Sides, task: CompareTask) -> list[CompareTask]:
    """Return the tasks of a comparison: one, unless both runs are compacted."""
    if not all(side.is_compacted for side in sides):
        return [task]
    choice = task.choice
    counts: dict[tuple[str, str], int] = {}
    for renames, side in ((choice.renames, sides[0]), ((), sides[1])):
        for name, kinds in side.names.items():
            for kind, count in kinds.items():
                key = kind, renamed(name, renames)
                counts[key] = counts.get(key, 0) + count
    wanted = wanted_tensors(choice, {key[0] for key in counts}, {key[1] for key in counts})
    windows = [side.reader.windows for side in sides]
    ends = sorted(set.intersection(*({each.manifest.last for each in own} for own in windows)))
    low, high = choice.steps or (None, None)
    inside = [end for end in ends if (low is None or end >= low) and (high is None or end < high)]
    steps = zip([low, *(end + 1 for end in inside)], [*inside, high], strict=True)
    # of both runs, in all of these windows
    most = 2 * _ROWS * max(len(ends), 1)
    return [
        task._replace(choice=choice._replace(tensors=tensors, steps=within))
        for within in steps
        for tensors in _sets({key: n for key, n in counts.items() if key in wanted}, most)
    ]


def _sets(counts: dict[tuple[str, str], int], most: int) -> Iterator[frozenset[tuple[str, str]]]:
    """Yield sets of tensors, in the order of windows, of about as many records as allowed."""
    found: set[tuple[str, str]] = set()
    total = 0
    for key in sorted(counts):
        if found and total + counts[key] > most:
            yield frozenset(found)
            found, total = set(), 0
        found.add(key)
        total += counts[key]
    yield frozenset(found)


def run_tasks(
    sides: Sides,
    tasks: list[CompareTask],
    executor: concurrent.futures.Executor | None,
    progress: Progress | None,
) -> Iterator[Found]:
    """Yield what each task has found, in order."""
    if executor is not None and not all(side.is_compacted for side in sides):
        log.warning("tensortap: comparing in one process: run `tensortap compact` on both runs")
    if len(tasks) == 1:
        yield compare_part(sides, tasks[0], progress)
        return
    if executor is None:
        results: Iterator[Found] = (compare_part(sides, task) for task in tasks)
    else:
        results = executor.map(_compare_elsewhere, tasks)
    for done, found in enumerate(results, 1):
        yield found
        if progress is not None:
            progress(done, len(tasks))


def _compare_elsewhere(task: CompareTask) -> Found:
    """Run a task in a process of an executor."""
    return compare_part(
        (_opened(task.runs[0], task.trust), _opened(task.runs[1], task.trust)), task
    )


@functools.lru_cache(maxsize=2)
def _opened(run: str, trust: bool) -> ComparedRun:
    return ComparedRun(run, trust=trust)


def compare_part(sides: Sides, task: CompareTask, progress: Progress | None = None) -> Found:
    """Compare the records that a task names."""
    records = (
        records_of_run(sides[0], task.choice, rename=True),
        records_of_run(sides[1], task.choice, rename=False),
    )
    plan = Plan(records, (sides[0].ranks, sides[1].ranks), task.tolerance, task.rules)
    differing: list[Judged] = []
    bitwise: Judged | None = None
    by_statistics = plan.by_statistics
    sizes: dict[Place, tuple[int, float]] = {}
    for item, outcome in zip(plan.items, _outcomes(sides, plan.items, progress), strict=True):
        place = item.key.name, item.key.kind, item.key.step
        seq, size = sizes.get(place, (item.seq, 0.0))
        least = 0.0 if outcome.comparison else 1e-300
        sizes[place] = min(seq, item.seq), max(size, outcome.size, least)
        by_statistics += outcome.by == "statistics"
        if not outcome.comparison:
            differing.append((item, outcome))
        if bitwise is None and not outcome.identical(item):
            bitwise = item, outcome
    return Found(
        plan.equal + plan.equal_shards + len(plan.items), plan.equal, by_statistics, plan.ignored,
        [bool((each.table.step[each.rows] < 0).any()) for each in records],
        differing, bitwise, sizes, _identical(plan), plan.lone, plan.unplaced,
    )  # fmt: skip


def records_of_run(side: ComparedRun, choice: Choice, *, rename: bool) -> ChosenRecords:
    """Return the chosen records of a run; of a compacted one, little else is read."""
    if not side.is_compacted:
        return choose(side.table(), choice, rename=rename)
    spelled = {name: renamed(name, choice.renames if rename else ()) for name in side.names}
    kinds = {kind for each in side.names.values() for kind in each}
    wanted = wanted_tensors(choice, kinds, spelled.values())
    own = {(kind, name) for name, of in spelled.items() for kind in kinds if (kind, of) in wanted}
    return choose(side.part(choice.steps or (None, None), own), choice, rename=rename)


def _identical(plan: Plan) -> Identical:
    records = plan.records[plan.ordered_by]
    table, rows = records.table, np.sort(np.concatenate(plan.equal_rows))
    rows = rows[first_of(codes(table.name[rows], table.kind[rows], table.step[rows]))]
    columns: tuple[Any, ...] = table.name, table.kind, table.step, table.seq
    return Identical(records.names, table.kinds, [column[rows] for column in columns])


def _outcomes(
    sides: Sides, items: list[RecordPair], progress: Progress | None
) -> Iterator[Outcome]:
    """Yield the outcomes of all pairs, in order."""

    def compare_chunk(start: int) -> list[Outcome]:
        return [compare_pair(sides, item) for item in items[start : start + _CHUNK]]

    done = 0
    executor = concurrent.futures.ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))))
    try:
        for found in executor.map(compare_chunk, range(0, len(items), _CHUNK)):
            yield from found
            done += len(found)
            if progress is not None:
                progress(done, len(items))
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
