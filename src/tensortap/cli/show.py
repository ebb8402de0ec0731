"""`tensortap show`: a run, or one of its values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tensortap.errors import TensortapError

if TYPE_CHECKING:
    from tensortap.api.run import Run
    from tensortap.record import Record


def show(
    run: Path = typer.Argument(..., help="The folder of a run."),
    name: str | None = typer.Argument(None, help="A name in it; without one, all of them."),
    step: int | None = typer.Option(None, help="The training step; else the latest."),
    rank: int | None = typer.Option(None, help="The rank, where there are several."),
    kind: str | None = typer.Option(None, help="Activation, Gradient, …, where there are several."),
    values: bool = typer.Option(False, help="Print the value itself as well."),
    at: str | None = typer.Option(
        None, help="Of a tensor of more than two axes, the index of the others: 0,3."
    ),
    picture: bool = typer.Option(True, help="A tensor as a small heatmap."),
) -> None:
    """Print a run, or what is held under a name, a line a tensor."""
    from tensortap.api.run import Run
    from tensortap.readers.reader import find

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

    from tensortap.frameworks.view import as_numpy
    from tensortap.readers.reader import value_of
    from tensortap.record import TensorData
    from tensortap.viz.cells import heatmap

    index = _index(at)
    value = value_of(run.reader.load(head))
    if not isinstance(value, TensorData):
        if index is not None:
            raise TensortapError(
                f"--at {at}: {head.name!r} is no tensor, or only its statistics are"
            )
        return
    console = Console()
    width = max(16, min(console.width - 2, 96))
    colored = console.color_system is not None
    drawn = heatmap(as_numpy(value), index, width=width, colored=colored)
    if drawn is not None:
        console.print(drawn)


def _index(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise TensortapError(f"--at is like 0,3, not {text!r}") from None
