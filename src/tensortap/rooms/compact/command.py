"""`tensortap compact`: sort a large run, so that pages and comparisons read little of it."""

from __future__ import annotations

import contextlib

import typer

from tensortap.cli.terminal import json_option, message, print_json, progress_bar
from tensortap.core.errors import MissingExtra, TensortapError


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
        executor = None
        if dask is not None:
            try:
                from distributed import Client
            except ImportError:
                raise MissingExtra.of("--dask needs Dask", "scale") from None
            try:
                client = Client(dask, timeout=10)
                executor = stack.enter_context(client).get_executor()
            except (OSError, ValueError) as error:
                raise TensortapError(f"--dask: cannot connect to {dask}: {error}") from None
        progress = stack.enter_context(progress_bar("compacting"))
        windows = compact_run(RunReader(run), executor, progress)
    if as_json:
        print_json({"windows": windows})
    message(f"wrote {windows:,} windows" if windows else "nothing to compact")
