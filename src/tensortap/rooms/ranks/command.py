"""`tensortap ranks`: where the ranks of a run are, which are behind, and which disagree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensortap.cli.terminal import json_option, print_json

if TYPE_CHECKING:
    from tensortap.rooms.ranks.findings import RankFinding

_MOST_RANKS = 32  # of more, only those that are behind are listed
_MOST_LINES = 20
_STYLES = {"replicas": "red", "outlier": "yellow", "behind": "yellow"}


def ranks(
    run: Path = typer.Argument(..., help="Folder of a run."),
    as_json: bool = json_option(
        "ranks (rank, place, records, first_step, last_step, behind), mesh, findings, limits"
    ),
) -> None:
    """Show the ranks of a run: their places and steps, who is behind, and who disagrees.

    Exit with 1 if replicas differ, if a rank is far from the others, or if it is behind.
    """
    from tensortap.rooms.ranks.findings import rank_findings
    from tensortap.rooms.ranks.mesh import mesh_layout
    from tensortap.rooms.ranks.ranks import progress, uncompared
    from tensortap.runs.run_reader import RunReader
    from tensortap.table.table import Table, table_of

    reader = RunReader(run)
    table: Table = table_of(reader)
    mesh, made = mesh_layout(table), progress(table)
    rows = [
        {"rank": rank, "place": mesh.place(rank), "records": records, "first_step": first,
         "last_step": last, "behind": behind}
        for rank, records, first, last, behind in zip(*(c.tolist() for c in made), strict=True)
    ]  # fmt: skip
    silent = sorted(set(reader.ranks) - {row["rank"] for row in rows})
    rows += [{"rank": rank, "place": "", "records": 0, "first_step": None, "last_step": None,
              "behind": len(table.steps())} for rank in silent]  # fmt: skip
    found = rank_findings(table)
    if as_json:
        print_json(
            {"ranks": rows, "mesh": mesh.dims, "findings": found, "limits": uncompared(table)}
        )
    else:
        _print(rows, mesh.dims, found, uncompared(table))
    raise typer.Exit(1 if found else 0)


def _print(
    rows: list[dict[str, Any]], dims: tuple[str, ...], found: list[RankFinding], limits: str
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tensortap.core.files import plain

    console = Console()
    newest = max((row["last_step"] for row in rows if row["records"]), default=0)
    records = sum(row["records"] for row in rows)
    mesh = "" if dims == ("rank",) else f", mesh {' × '.join(map(plain, dims))}"
    console.print(
        f"{len(rows):,} ranks{mesh}, {records:,} records, newest step {newest:,}", highlight=False
    )
    late = [row for row in rows if row["behind"]]
    listed = rows if len(rows) <= _MOST_RANKS else late[:_MOST_LINES]
    if listed:
        table = Table(box=None, pad_edge=False, header_style="bold dim")
        for name in ("rank", "place", "records", "steps", "behind"):
            table.add_column(name, justify="left" if name == "place" else "right")
        for row in listed:
            steps = f"{row['first_step']:,} to {row['last_step']:,}" if row["records"] else "none"
            behind = f"{row['behind']:,} steps" if row["behind"] else ""
            table.add_row(
                str(row["rank"]), Text(plain(row["place"]), style="cyan"), f"{row['records']:,}",
                steps, Text(behind, style="yellow"),
            )  # fmt: skip
        console.print(table)
    if len(rows) > _MOST_RANKS:
        more = len(late) - _MOST_LINES
        words = f"and {more:,} more are behind; " if more > 0 else ""
        words += f"{len(rows) - len(late):,} ranks are at step {newest:,}"
        console.print(words, style="dim", highlight=False)
    for each in found[:_MOST_LINES]:
        console.print(Text(plain(each.message, 400), style=_STYLES[each.rule]))
    if len(found) > _MOST_LINES:
        console.print(f"and {len(found) - _MOST_LINES:,} more (--json)", style="dim")
    if not found:
        console.print("no rank disagrees with the others", style="dim")
    if limits and len(rows) > 1:
        console.print(limits, style="dim", highlight=False)
