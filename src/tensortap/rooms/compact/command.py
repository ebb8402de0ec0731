"""`tensortap compact`: sort a large run, so that pages and comparisons read little of it."""

from __future__ import annotations

import contextlib

import typer

from tensortap.cli.terminal import (
    dask_executor,
    json_option,
    message,
    print_json,
    progress_bar,
)


def compact(
    run: str = typer.Argument(..., help="Folder or URL of a run."),
    dask: str | None = typer.Option(
        None, metavar="tcp://host:8786", help="Use the workers of a Dask cluster."
    ),
    as_json: bool = json_option("windows"),
) -> None:
    """Sort a large run by tensors; what was compacted before stays, and so do its files."""
    from tensortap.rooms.compact.compact import compact_run
    from tensortap.runs.run_reader import RunReader

    with contextlib.ExitStack() as stack:
        executor = stack.enter_context(dask_executor(dask))
        progress = stack.enter_context(progress_bar("compacting"))
        windows = compact_run(RunReader(run), executor, progress)
    if as_json:
        print_json({"windows": windows})
    message(f"wrote {windows:,} windows" if windows else "nothing to compact")
