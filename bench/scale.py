"""Rows on large runs: what compaction changes, and how reading grows with ranks.

python -m bench scale                               # 10 million records, which takes some minutes
python -m bench.scale runs/large/20260101_120000    # a run of bench.scale_runs
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from bench.harness import Row
from bench.scale_runs import write_run

RANKS, STEPS, NAMES = 128, 800, 100
COMPARED = 16, 1000, 100  # ranks, steps and names of two runs
RATE = 100_000  # records that are compacted per CPU second, at least
# question → at most this share of the CPU time and of the memory of the run before compaction
TARGETS = {"heatmap": (1 / 20, 1 / 5), "one tensor": (1 / 20, None), "stats": (1 / 10, None)}
QUESTIONS = (
    "heatmap", "lines", "one tensor", "exponents", "metrics", "replicas", "stats", "names",
)  # fmt: skip


def _answer(run: Any, question: str) -> Callable[[], object]:
    """Return what asks a question about a run."""
    from tensortap.rooms.figures.figures.heatmap import heatmap_figure
    from tensortap.rooms.ranks.ranks import over_steps
    from tensortap.table.columns import exponents

    table = run.table()
    kind = "Activation"
    if question == "heatmap":
        return lambda: heatmap_figure(table.whole(), kind=kind, metric="rm2")
    if question == "lines":
        return lambda: [
            table.whole().column("rm2")[table.whole().series(kind, name)]
            for name in table.layers(kind)[:6]
        ]
    if question == "one tensor":
        return lambda: over_steps(table, kind, table.layers(kind)[0], "rm2")
    if question == "exponents":
        return lambda: exponents(table.whole(), table.whole().rows(kind=kind, step=400))
    asked = {"metrics": run.metrics, "replicas": run.ranks, "stats": run.stats, "names": run.names}
    return asked[question]


def _compare(a: pathlib.Path, b: pathlib.Path) -> None:
    """Compare two runs, in which one rank has other gradients in the end."""
    from tensortap.rooms.compare.runs import compare_runs

    report = compare_runs(a, b)
    assert report.differences
    assert report.equal


def _compact(path: pathlib.Path) -> None:
    """Compact a run."""
    import tensortap as tap

    tap.open(path).compact()


def _ask(path: pathlib.Path, question: str) -> None:
    """Open a run and ask it."""
    import tensortap as tap

    _answer(tap.open(path), question)()


def _measure(pipe: Any, job: Callable[..., None], *arguments: Any) -> None:
    """Send the CPU seconds that a job took in all threads, and the memory of the process in MB."""
    import pandas
    import pyarrow.compute
    import pyarrow.parquet

    from tensortap.rooms.figures.figures.heatmap import heatmap_figure

    assert pandas
    assert heatmap_figure
    assert pyarrow.compute
    assert pyarrow.parquet
    start = time.process_time()
    job(*arguments)
    seconds = time.process_time() - start
    # not `ru_maxrss`, which a process has from the one that started it
    status = pathlib.Path("/proc/self/status").read_text()
    memory = int(status.partition("VmHWM:")[2].split()[0]) / 1000
    pipe.send((seconds, memory))


def measured(job: Callable[..., None], *arguments: Any) -> tuple[float, float]:
    """Return CPU seconds and memory in MB of a job, in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    child = spawn.Process(target=_measure, args=(there, job, *arguments))
    child.start()
    there.close()
    found: tuple[float, float] = here.recv()
    child.join()
    return found


def compacted(path: pathlib.Path) -> list[Row]:
    """Compact a copy of a run, and return a row for each question."""
    import tensortap as tap

    copy = path.with_name(f"{path.name}-compacted")
    rows = []
    if not copy.exists():
        shutil.copytree(path, copy, copy_function=os.link)
        seconds, memory = measured(_compact, copy)
        rate = sum(tap.open(path).reader.counts().values()) / seconds
        note = f"{rate:,.0f} records per CPU second, {memory:.0f} MB"
        name = f"compaction ÷ {RATE:,} records per CPU second"
        rows.append(Row(name, 1, False, [rate], [RATE], unit="records", note=note))
    for question in QUESTIONS:
        (ours, memory), (base, before) = (measured(_ask, each, question) for each in (copy, path))
        time_limit, memory_limit = TARGETS.get(question, (None, None))
        name = f"{question} of a compacted run ÷ before"
        note = f"{ours:.2f} s and {memory:.0f} MB; before {base:.2f} s and {before:.0f} MB"
        rows.append(Row(name, time_limit, True, [ours], [base], note=note))
        if memory_limit is not None:
            title = f"memory of the {question}"
            rows.append(Row(title, memory_limit, True, [memory], [before], unit="MB"))
    return rows


def compare_at_scale() -> list[Row]:
    """Compare two runs of 1.6 million records, as they are and compacted."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=".bench-", dir=pathlib.Path(__file__).parent))
    try:
        runs = [write_run(folder / name, *COMPARED, clean=name == "a") for name in "ab"]
        rows = []
        for state in ("two runs", "two compacted runs"):
            seconds, memory = measured(_compare, *runs)
            name, note = f"compare {state} of 1.6 million records", f"{seconds:.2f} s"
            rows.append(Row(f"{name} ÷ 5 CPU s", 1, True, [seconds], [5.0], note=note))
            note = f"{memory:.0f} MB"
            rows.append(Row(f"{name} ÷ 1 GB", 1, True, [memory], [1000.0], unit="MB", note=note))
            for run in runs:
                _compact(run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def scale() -> list[Row]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix=".bench-", dir=pathlib.Path(__file__).parent))
    try:
        return compacted(write_run(folder, RANKS, STEPS, NAMES, clean=True))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


ROWS = [scale, compare_at_scale]

if __name__ == "__main__":
    for row in compacted(pathlib.Path(sys.argv[1])):
        print(f"{row.name}: {row.ratio:.4f}  {row.note}")
