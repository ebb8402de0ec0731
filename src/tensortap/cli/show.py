"""`tensortap show`: a run, or one of its values."""

from __future__ import annotations

from pathlib import Path

import typer


def show(
    run: Path = typer.Argument(..., help="The folder of a run."),
    name: str | None = typer.Argument(None, help="A name in it; without one, all of them."),
    step: int | None = typer.Option(None, help="The training step; else the latest."),
    rank: int | None = typer.Option(None, help="The rank, where there are several."),
    kind: str | None = typer.Option(None, help="Activation, Gradient, …, where there are several."),
    values: bool = typer.Option(False, help="Print the value itself as well."),
) -> None:
    """Print a run, or what is held under a name, a line a tensor."""
    from tensortap.console.run import Run

    opened = Run(run)
    if name is None:
        opened.summary()
        return
    opened.describe(name, step=step, rank=rank, kind=kind)
    if values:
        print(opened.get(name, step=step, rank=rank, kind=kind))
