"""`tensortap show`: print a run, or one of its values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tensortap.cli.terminal import parse_numbers
from tensortap.core.errors import TensortapError

if TYPE_CHECKING:
    from tensortap.api.run import Run
    from tensortap.core.record import Record


def show(
    run: Path = typer.Argument(..., help="Folder of a run."),
    name: str | None = typer.Argument(None, help="Name of a record. Default: summarize the run."),
    step: int | None = typer.Option(None, help="Training step. Default: the latest."),
    rank: int | None = typer.Option(None, help="Rank, if there are several."),
    kind: str | None = typer.Option(None, help="Activation, Gradient, …, if there are several."),
    values: bool = typer.Option(False, help="Also print the value."),
    at: str | None = typer.Option(
        None, help="Index into all but the last two axes of a tensor: 0,3."
    ),
    picture: bool = typer.Option(True, help="Draw a tensor as a small heatmap."),
) -> None:
    """Print a run, or one value of it, with one line per tensor."""
    from tensortap.api.run import Run
    from tensortap.runs.reader import find

    opened = Run(run)
    if name is None:
        opened.summary()
        return
    opened.describe(name, step=step, rank=rank, kind=kind)
    if picture:
        _draw(opened, find(opened.reader, name, step=step, rank=rank, kind=kind), at)
    if values:
        print(opened.get(name, step=step, rank=rank, kind=kind))


def _draw(run: Run, head: Record, at: str | None) -> None:
    from rich.console import Console

    from tensortap.core.record import TensorData
    from tensortap.core.rooms import offers
    from tensortap.runs.reader import value_of
    from tensortap.values.view import as_numpy

    index = None if at is None else parse_numbers(at, "--at", "0,3")
    value = value_of(run.reader.load(head))
    if not isinstance(value, TensorData):
        if index is not None:
            raise TensortapError(
                f"--at {at}: {head.name!r} is not a tensor, or the run has only its statistics"
            )
        return
    console = Console()
    width = max(16, min(console.width - 2, 96))
    colored = console.color_system is not None
    for heatmap in offers("terminal picture"):
        try:
            drawn = heatmap(as_numpy(value), index, width=width, colored=colored)
        except ValueError as error:
            raise TensortapError(f"--at {at}: {error}") from None
        if drawn is not None:
            console.print(drawn)
