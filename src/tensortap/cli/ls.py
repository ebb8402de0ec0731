"""`tensortap ls`: list the runs of a folder."""

from __future__ import annotations

from pathlib import Path

import typer

from tensortap.cli.terminal import json_option, print_json


def ls(
    folder: Path = typer.Argument(Path("runs"), help="Folder of runs."),
    as_json: bool = json_option(
        "a list of run, name, started, state, records, names, ranks, nbytes"
    ),
) -> None:
    """List the runs of a folder with name, time, state, records, names, ranks and size."""
    from tensortap.api.run import list_runs

    runs = list_runs(folder)
    if as_json:
        print_json(runs)
        return
    from rich.console import Console
    from rich.table import Table

    from tensortap.core.limits import format_size

    table = Table(box=None, pad_edge=False, header_style="bold dim")
    columns = ("run", "name", "started", "state", "records", "names", "ranks", "size")
    for name in columns:
        right = name in ("records", "names", "ranks", "size")
        table.add_column(name, justify="right" if right else "left")
    for run in runs:
        started, size = str(run["started"])[:19].replace("T", " "), format_size(run["nbytes"])
        shown = {**run, "started": started, "records": f"{run['records']:,}", "size": size}
        table.add_row(*(str(shown[name]) for name in columns))
    Console().print(table)
