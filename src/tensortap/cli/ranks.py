"""`tensortap ranks`: which ranks wrote a run, which are behind, and which disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import typer

from tensortap.cli.terminal import print_json


def ranks(
    run: Path = typer.Argument(..., help="Folder of a run."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show the ranks of a run: their steps, and replicas of parameters that differ.

    Exit with 1 if ranks disagree.
    """
    from tensortap.readers.run import RunReader
    from tensortap.table.replicas import unequal_replicas
    from tensortap.table.table import Table, table_of

    reader = RunReader(run)
    table: Table = table_of(reader)
    newest = int(table.step.max()) if len(table) else 0
    rows: list[dict[str, Any]] = []
    for rank in reader.ranks:
        steps = table.step[table.rank == rank]
        last = int(steps.max()) if len(steps) else None
        rows.append({
            "rank": rank, "records": len(steps),
            "first_step": int(steps.min()) if len(steps) else None, "last_step": last,
            "behind": len(np.unique(table.step[table.step > (-1 if last is None else last)])),
        })  # fmt: skip
    unequal = unequal_replicas(table)
    if as_json:
        print_json({"ranks": rows, "unequal": [each._asdict() for each in unequal]})
    else:
        _print(rows, newest, [str(each) for each in unequal])
    raise typer.Exit(1 if unequal else 0)


def _print(rows: list[dict[str, Any]], newest: int, unequal: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tensortap.files import plain

    shown = Table(box=None, pad_edge=False, header_style="bold dim")
    for name in ("rank", "records", "steps", "behind"):
        shown.add_column(name, justify="right")
    for row in rows:
        steps = f"{row['first_step']:,} to {row['last_step']:,}" if row["records"] else "none"
        behind = f"{row['behind']:,} steps" if row["behind"] else ""
        shown.add_row(str(row["rank"]), f"{row['records']:,}", steps, Text(behind, style="yellow"))
    console = Console()
    console.print(shown)
    console.print(f"newest step {newest:,}", style="dim", highlight=False)
    for line in unequal:
        console.print(Text(plain(line), style="red"))
    if not unequal:
        console.print("all replicas of parameters are equal", style="dim")
