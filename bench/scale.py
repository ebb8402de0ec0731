"""Rows on runs of many ranks: how reading grows from 16 ranks on.

python -m bench many_ranks
python -m bench.scale runs/large/20260101_120000    # a run of bench.scale_runs
"""

from __future__ import annotations

import multiprocessing
import pathlib
import resource
import shutil
import sys
import tempfile
from typing import Any

from bench.harness import Row, time_of
from bench.scale_runs import write_run

STEPS, NAMES = 100, 50
SMALLEST, LARGER = 16, (64, 256, 1024)


def _measure(pipe: Any, run: pathlib.Path, task: str) -> None:
    """Send the seconds of each stage, and the peak memory in MB."""
    import pyarrow.compute
    import pyarrow.parquet

    from tensortap.rooms.figures.figures import heatmap_figure, ranks_figure
    from tensortap.rooms.ranks.findings import rank_findings
    from tensortap.rooms.ranks.mesh import mesh_layout
    from tensortap.table.table import table_of

    assert pyarrow.compute
    assert pyarrow.parquet
    tables: list[Any] = []
    found = {"open": time_of(lambda: tables.append(table_of(run)))}
    (table,) = tables
    if task == "page":
        found["figure"] = time_of(
            lambda: heatmap_figure(table.whole(), kind="Activation", metric="rm2")
        )
        found["refresh"] = time_of(table.whole().refresh, 3)
    elif task == "view":
        name = table.layers("Activation")[0]
        found["view"] = time_of(
            lambda: ranks_figure(
                table, mesh_layout(table), kind="Activation", metric="rm2", name=name
            )
        )
    else:
        found["ranks"] = time_of(lambda: rank_findings(table))
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    pipe.send(found)


def measured(run: pathlib.Path) -> dict[str, float]:
    """Return seconds and the peak memory in MB; each task has a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, float] = {}
    for task in ("ranks", "view", "page"):
        here, there = spawn.Pipe()
        child = spawn.Process(target=_measure, args=(there, run, task))
        child.start()
        there.close()
        found |= here.recv()
        child.join()
    return found


def _written_and_measured(folder: pathlib.Path, ranks: int) -> dict[str, float]:
    run = write_run(folder / str(ranks), ranks, STEPS, NAMES)
    found = measured(run)
    shutil.rmtree(run)
    return found


def described(found: dict[str, float]) -> str:
    """Return what was measured as a line of text."""
    return ", ".join(f"{k} {v:.3g}" for k, v in found.items()) + " (s, memory in MB)"


def many_ranks() -> list[Row]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix=".bench-", dir=pathlib.Path(__file__).parent))
    try:
        base = _written_and_measured(folder, SMALLEST)
        rows = []
        for ranks in LARGER:
            found = _written_and_measured(folder, ranks)
            times = [each["open"] + each["figure"] for each in (found, base)]
            note = described(found)
            name = f"first page of {ranks:,} ranks ÷ of {SMALLEST}"
            rows.append(Row(name, None, True, times[:1], times[1:], note=note))
        return rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)


ROWS = [many_ranks]

if __name__ == "__main__":
    print(described(measured(pathlib.Path(sys.argv[1]))))
