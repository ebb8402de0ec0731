"""`tensortap check`: what is wrong with a training, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tensortap.cli.terminal import json_option, message, print_json

if TYPE_CHECKING:
    from tensortap.rooms.health.report import RuleHealth

FIELDS = "rule, state, looks_for, remedy, alerts, name, kind, step, rank, message, also"


def check(
    run: str = typer.Argument(..., help="Folder or URL of a run, or host:port of a live session."),
    as_json: bool = json_option(f"a list of {FIELDS}"),
    show_all: bool = typer.Option(False, "--all", help="Name all rules."),
) -> None:
    """Show what each rule has found in a run, where, since when, and what to do.

    Exit with 1 if something is wrong; hints do not count. A run that was tracked without alerts
    is checked now, as far as its statistics tell.
    """
    from tensortap.api.open import open as open_run
    from tensortap.rooms.health.report import health_of
    from tensortap.table.table import table_of

    reader = open_run(run).reader
    rows = health_of(table_of(reader), reader, compute=True)
    if as_json:
        print_json(rows)
    else:
        print_rules(run, rows, show_all=show_all)
    raise typer.Exit(int(any(row.state == "problem" for row in rows)))


def print_rules(
    title: str, rows: list[RuleHealth], *, stderr: bool = False, show_all: bool = False
) -> None:
    """Print how many rules found something, and what."""
    from rich.console import Console

    from tensortap.rooms.health.report import health_text, summary_of

    head = f"{title}: {summary_of(rows)}"
    console = Console(stderr=stderr)
    if stderr:
        message(head)
    else:
        console.print(head, soft_wrap=True, highlight=False, markup=False)
    console.print(health_text(rows, all_rules=show_all), soft_wrap=True, end="")
