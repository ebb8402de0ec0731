"""`tensortap ranks`: where the ranks of a run are, which are behind, and which disagree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensortap.cli.terminal import print_json

if TYPE_CHECKING:
    from tensortap.table.ranks import FarRank
    from tensortap.table.replicas import UnequalReplica

_MOST_RANKS = 32  # of more, only those that are behind or far are listed
_MOST_LINES = 20
_STEPS = 20  # the last recorded steps, in which ranks are compared


def ranks(
    run: Path = typer.Argument(..., help="Folder of a run."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show the ranks of a run: their places and steps, who is behind, and who disagrees.

    Exit with 1 if replicas of a parameter differ.
    """
    from tensortap.readers.run import RunReader
    from tensortap.table.mesh import mesh_layout
    from tensortap.table.ranks import far_ranks, progress
    from tensortap.table.replicas import unequal_replicas
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
    far, unequal = far_ranks(table, "rm2", _STEPS), unequal_replicas(table)
    if as_json:
        shown = {"ranks": rows, "mesh": mesh.dims, "far": [each._asdict() for each in far],
                 "unequal": [each._asdict() for each in unequal]}  # fmt: skip
        print_json(shown)
    else:
        _print(rows, mesh.dims, far, _unequal_lines(unequal))
    raise typer.Exit(1 if unequal else 0)


def _print(
    rows: list[dict[str, Any]], dims: tuple[str, ...], far: list[FarRank], unequal: list[str]
) -> None:
    from rich.console import Console
    from rich.text import Text

    from tensortap.files import plain

    console = Console()
    newest = max((row["last_step"] for row in rows if row["records"]), default=0)
    late = [row for row in rows if row["behind"]]
    records = sum(row["records"] for row in rows)
    mesh = "" if dims == ("rank",) else f", mesh {' × '.join(map(plain, dims))}"
    console.print(
        f"{len(rows):,} ranks{mesh}, {records:,} records, newest step {newest:,}", highlight=False
    )
    if len(rows) <= _MOST_RANKS:
        console.print(_table(rows))
    elif late:
        console.print(_table(late[:_MOST_LINES]))
    if len(rows) > _MOST_RANKS:
        more = len(late) - _MOST_LINES
        words = [f"and {more:,} more are behind"] if more > 0 else []
        words.append(f"{len(rows) - len(late):,} ranks are at step {newest:,}")
        console.print("; ".join(words), style="dim", highlight=False)
    lines = [(line, "red") for line in unequal] + [(line, "yellow") for line in _far_lines(far)]
    for line, style in lines[:_MOST_LINES]:
        console.print(Text(plain(line, 400), style=style))
    if len(lines) > _MOST_LINES:
        console.print(f"and {len(lines) - _MOST_LINES:,} more (--json)", style="dim")
    if not unequal:
        console.print("all replicas of parameters are equal", style="dim")
    if not far:
        console.print("no rank is far from the others", style="dim")


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from tensortap.files import plain

    has_places = any(row["place"] for row in rows)
    shown = Table(box=None, pad_edge=False, header_style="bold dim")
    for name in ("rank", *(["place"] if has_places else []), "records", "steps", "behind"):
        shown.add_column(name, justify="left" if name == "place" else "right")
    for row in rows:
        steps = f"{row['first_step']:,} to {row['last_step']:,}" if row["records"] else "none"
        behind = f"{row['behind']:,} steps" if row["behind"] else ""
        place = [Text(plain(row["place"]), style="cyan")] if has_places else []
        cells = (f"{row['records']:,}", steps, Text(behind, style="yellow"))
        shown.add_row(str(row["rank"]), *place, *cells)
    return shown


def _unequal_lines(unequal: list[UnequalReplica]) -> list[str]:
    """Return one line per set of ranks: the first parameter that differs, and how many more."""
    by_ranks: dict[tuple[int, ...], list[UnequalReplica]] = {}
    for each in unequal:
        by_ranks.setdefault(tuple(each.ranks), []).append(each)
    more = {ranks: len(found) - 1 for ranks, found in by_ranks.items()}
    return [
        f"{found[0]}" + (f"; and {more[ranks]:,} more tensors" if more[ranks] else "")
        for ranks, found in by_ranks.items()
    ]


def _far_lines(far: list[FarRank]) -> list[str]:
    """Return one line per rank: how many of its tensors are far, and which is the farthest."""
    by_rank: dict[int, list[FarRank]] = {}
    for each in far:
        by_rank.setdefault(each.rank, []).append(each)
    lines = []
    for rank, found in by_rank.items():
        first = min(each.first_step for each in found)
        worst = max(found, key=lambda each: each.deviations)
        count = "1 tensor" if len(found) == 1 else f"{len(found):,} tensors"
        lines.append(
            f"rank {rank}: {count} far from the other ranks since step {first:,} or earlier, "
            f"most {worst.name} ({worst.kind})"
        )
    return lines
