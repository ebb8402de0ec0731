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
    for name in ("run", "name", "started", "state", "records", "names", "ranks", "size"):
        right = name in ("records", "names", "ranks", "size")
        table.add_column(name, justify="right" if right else "left")
    for run in runs:
        table.add_row(
            str(run["run"]),
            str(run["name"]),
            str(run["started"])[:19].replace("T", " "),
            str(run["state"]),
            f"{run['records']:,}",
            str(run["names"]),
            str(run["ranks"]),
            format_size(int(str(run["nbytes"]))),
        )
    Console().print(table)
