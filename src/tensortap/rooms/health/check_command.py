"""`tensortap check`: what is wrong with a run, and what to do about it."""

from __future__ import annotations

import typer

from tensortap.cli.terminal import print_json


def check(
    run: str = typer.Argument(..., help="Folder or URL of a run, or host:port of a live session."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show what each rule has found in a run, where, since when, and what to do.

    Exit with 1 if something is wrong; hints do not count. A run that was tracked without alerts
    is checked now, as far as its statistics tell.
    """
    from rich.console import Console

    from tensortap.api.open import open as open_run
    from tensortap.rooms.health.report import health_text, summary_of
    from tensortap.rooms.health.rule_health import health_of
    from tensortap.table.table import table_of

    reader = open_run(run).reader
    rows = health_of(table_of(reader), reader, compute=True)
    if as_json:
        print_json([row._asdict() for row in rows])
    else:
        console = Console()
        console.print(f"{run}: {summary_of(rows)}", soft_wrap=True, highlight=False, markup=False)
        console.print(health_text(rows), soft_wrap=True, end="")
    raise typer.Exit(int(any(row.state == "problem" for row in rows)))
