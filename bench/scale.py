"""Rows on runs of many ranks: how reading grows from 16 ranks on."""

from __future__ import annotations

import multiprocessing
import pathlib
import resource
import shutil
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

    from tensortap.table.ranks import far_ranks
    from tensortap.table.replicas import unequal_replicas
    from tensortap.table.table import table_of
    from tensortap.viz.figures import heatmap_figure

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
    else:
        found["ranks"] = time_of(lambda: (far_ranks(table, "rm2", 20), unequal_replicas(table)))
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    pipe.send(found)


def _measured(folder: pathlib.Path, ranks: int) -> dict[str, float]:
    run = write_run(folder / str(ranks), ranks, STEPS, NAMES)
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, float] = {}
    for task in ("ranks", "page"):
        here, there = spawn.Pipe()
        child = spawn.Process(target=_measure, args=(there, run, task))
        child.start()
        there.close()
        found |= here.recv()
        child.join()
    shutil.rmtree(run)
    return found


def many_ranks() -> list[Row]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix=".bench-", dir=pathlib.Path(__file__).parent))
    try:
        base = _measured(folder, SMALLEST)
        rows = []
        for ranks in LARGER:
            found = _measured(folder, ranks)
            times = [each["open"] + each["figure"] for each in (found, base)]
            note = ", ".join(f"{k} {v:.3g}" for k, v in found.items()) + " (s, memory in MB)"
            name = f"first page of {ranks:,} ranks ÷ of {SMALLEST}"
            rows.append(Row(name, None, True, times[:1], times[1:], note=note))
        return rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)


ROWS = [many_ranks]
