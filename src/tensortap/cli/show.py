"""`tensortap show`: print a run, or one of its values."""

from __future__ import annotations

from pathlib import Path

import typer


def show(
    run: Path = typer.Argument(..., help="Folder of a run."),
    name: str | None = typer.Argument(None, help="Name of a record. Default: summarize the run."),
    step: int | None = typer.Option(None, help="Training step. Default: the latest."),
    rank: int | None = typer.Option(None, help="Rank, if there are several."),
    kind: str | None = typer.Option(None, help="Activation, Gradient, …, if there are several."),
    values: bool = typer.Option(False, help="Also print the value."),
) -> None:
    """Print a run, or one value of it, with one line per tensor."""
    from tensortap.api.run import Run

    opened = Run(run)
    if name is None:
        opened.summary()
        return
    opened.describe(name, step=step, rank=rank, kind=kind)
    if values:
        print(opened.get(name, step=step, rank=rank, kind=kind))
