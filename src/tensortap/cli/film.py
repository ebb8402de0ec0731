"""`tensortap film`: a film of one name in a run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import typer

from tensortap.cli.progress import progress_bar
from tensortap.errors import TensortapError
from tensortap.select import parse_steps


def film(
    run: str = typer.Argument(..., help="The folder of a run, or its URL."),
    name: str = typer.Argument(..., help="A name in it."),
    target: Path = typer.Argument(..., help="out.mp4, out.gif, or a folder for PNG frames."),
    mode: str = typer.Option(
        "auto", help="auto, image, surface, histogram, pca, pca_lowrank, tsne or grid."
    ),
    size: str = typer.Option("640x480", metavar="WxH", help="Of the frames, in pixels."),
    fps: float = typer.Option(20.0, help="Frames a second."),
    colors: str = typer.Option(
        "follow", "--range", metavar="RULE",
        help="follow, exact, fixed, or two numbers: --range=-1,1",
    ),
    colormap: str = typer.Option("auto", help="aurora, ember, grey, polar or slate."),
    symmetric: bool | None = typer.Option(
        None, "--symmetric/--no-symmetric",
        help="Zero in the middle of the colours; else where both signs occur.",
    ),
    theme: str = typer.Option("dark", help="dark or light."),
    legend_color: str | None = typer.Option(
        None, metavar="COLOUR", help="Of the text: '#rrggbb', or a name like orange."
    ),
    seed: int = typer.Option(0, help="Of the rows that are chosen, and of t-SNE."),
    format: str | None = typer.Option(  # noqa: A002  as people call it
        None, help="mp4, gif or png; else as the target's suffix says."
    ),
    rank: int | None = typer.Option(None, help="The rank; else the lowest that is there."),
    kind: str | None = typer.Option(None, help="Weight, Gradient, …, where there are several."),
    steps: str | None = typer.Option(
        None, metavar="10:20", help="Only these steps, both included; 10: and :20 too."
    ),
) -> None:  # fmt: skip
    """Make a film of the tensors that a run holds under a name."""
    from tensortap.films.film import film as make
    from tensortap.readers.run import RunReader

    with progress_bar("filming") as progress:
        frames = make(
            RunReader(run), name, target, rank=rank, kind=kind, steps=parse_steps(steps),
            fps=fps, format=format, progress=progress, mode=mode, size=_size(size),
            range=_range(colors), colormap=colormap, symmetric=symmetric, theme=theme,
            legend_color=legend_color, seed=seed,
        )  # fmt: skip
    print(f"tensortap: {frames:,} frames in {target}", file=sys.stderr)


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})[x,](\d{1,5})", text)
    if match is None:
        raise TensortapError(f"--size is like 640x480, not {text!r}")
    return int(match[1]), int(match[2])


def _range(text: str) -> str | tuple[float, float]:
    if "," not in text:
        return text
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise TensortapError(f"--range is a rule or two numbers like -1,1, not {text!r}") from None
    return low, high
