"""`tensortap why`: print why values stopped being finite."""

from __future__ import annotations

import typer

from tensortap.cli.terminal import json_option, message, print_json


def why(
    run: str = typer.Argument(..., help="Folder or URL of a run, or host:port of a live session."),
    step: int | None = typer.Option(None, help="Training step of the verdict. Default: the last."),
    rank: int | None = typer.Option(None, help="Rank of the verdict, if there are several."),
    as_json: bool = json_option(
        "rule, name, kind, step, rank, module, message, origin, call, again, facts, severity, "
        "explanation (name, operation, phase, module, why, file, line, function, first_line, "
        "source, operands, chain)"
    ),
) -> None:
    """Print the operation that made the first NaN or Inf, its line, values, and what led there."""
    from rich.console import Console

    from tensortap.api.open import open as open_run
    from tensortap.rooms.ops.verdicts import NO_VERDICT, verdict_of
    from tensortap.rooms.ops.why import why_text
    from tensortap.table.table import table_of

    found = verdict_of(table_of(open_run(run).reader).alerts(), step, rank)
    if found is None:
        message(f"{run}: {NO_VERDICT}")
        raise typer.Exit(1)
    if as_json:
        print_json(found)
        return
    Console().print(why_text(found), soft_wrap=True)
