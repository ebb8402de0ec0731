"""`tensortap ls`: the runs of a folder."""

from __future__ import annotations

from pathlib import Path

import typer


def ls(
    folder: Path = typer.Argument(Path("runs"), help="Where the runs are."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
) -> None:
    """List the runs of a folder: when, how many records of how many ranks, how large."""
    from tensortap.api.run_list import list_runs

    found = list_runs(folder)
    if as_json:
        import json

        print(json.dumps(found, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    from tensortap.limits import format_size

    table = Table(box=None, pad_edge=False, header_style="bold dim")
    for name in ("run", "started", "state", "records", "names", "ranks", "size"):
        right = name in ("records", "names", "ranks", "size")
        table.add_column(name, justify="right" if right else "left")
    for run in found:
        table.add_row(
            str(run["run"]),
            str(run["started"])[:19].replace("T", " "),
            str(run["state"]),
            f"{run['records']:,}",
            str(run["names"]),
            str(run["ranks"]),
            format_size(int(str(run["nbytes"]))),
        )
    Console().print(table)
