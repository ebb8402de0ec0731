"""Measure, print, and save as JSON: `python -m bench [name …]`."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import pathlib
import platform
import sys
import tempfile

from rich.console import Console
from rich.table import Table

from bench.harness import Row
from bench.pages import write_tables
from bench.processes import measure as measure_in_child

MODULES = (
    "bench.live", "bench.load", "bench.runs", "bench.stats", "bench.track", "bench.budgets",
    "bench.compiled",
    "bench.compiled_ways", "bench.track_jax", "bench.compare",
    "bench.compare_runs", "bench.align", "bench.films",
    "bench.trace", "bench.trace_hdf5", "bench.watch", "bench.ops", "bench.scale", "bench.programs",
    "bench.connections",
    "bench.peers.live", "bench.peers.storing", "bench.peers.tracking", "bench.peers.comparing",
)  # fmt: skip
RESULTS = pathlib.Path(__file__).with_name("results.json")


def main(arguments: list[str]) -> int:
    markdown = "--markdown" in arguments  # also write tables of the documentation
    wanted = [word for word in arguments if word != "--markdown"]
    console = Console(width=150)
    table = Table(title="tensortap: ratios within one run", header_style="bold")
    for column in ("row", "ratio", "first", "middle half", "limit", "naive", "", "note"):
        table.add_column(column, justify="left" if column in ("row", "note") else "right")
    rows: list[Row] = []
    chosen = [
        (module, measure)
        for module in MODULES
        for measure in importlib.import_module(module).ROWS
        if not wanted or any(word in measure.__name__ for word in wanted)
    ]
    if not chosen:
        names = [m.__name__ for module in MODULES for m in importlib.import_module(module).ROWS]
        console.print(f"unknown row {' or '.join(wanted)}; rows are {', '.join(names)}")
        return 2
    spawn = multiprocessing.get_context("spawn")
    failed = []
    for module, measure in chosen:
        console.print(f"… {measure.__name__}", style="dim")
        here, there = spawn.Pipe()
        # one process per row, so that rows share no session, thread or warm cache
        child = spawn.Process(target=measure_in_child, args=(there, module, measure.__name__))
        child.start()
        there.close()
        try:
            rows.extend(here.recv())
        except EOFError:  # the child has printed its traceback
            failed.append(measure.__name__)
        child.join()
    for row in rows:
        low, high = row.spread
        limit = "" if row.limit is None else f"{'≤' if row.at_most else '≥'} {row.limit:g}"
        first = "" if row.first is None else f"{row.first:.2f}"
        naive = f"{row.naive:.2f}" if row.naive is not None else ""
        mark = "" if row.limit is None else "[green]✓[/]" if row.kept else "[red]✗[/]"
        table.add_row(
            row.name,
            f"{row.ratio:.2f}",
            first + ("" if row.first_kept else " [red]✗[/]"),
            f"{low:.2f}–{high:.2f}",
            limit,
            naive,
            mark,
            row.note,
        )
    console.print(table)
    result = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rows": [row.as_dict() for row in rows],
    }
    RESULTS.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    console.print(f"saved to {RESULTS}", style="dim")
    if markdown:
        for page in write_tables(rows):
            console.print(f"saved to {page}", style="dim")
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="bold red")
        return 2
    return 0 if all(row.kept and row.first_kept for row in rows) else 1


if __name__ == "__main__":
    # use a separate key, not the user's
    with tempfile.TemporaryDirectory() as home:
        import os

        os.environ["XDG_CONFIG_HOME"] = home
        sys.exit(main(sys.argv[1:]))
