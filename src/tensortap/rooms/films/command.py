"""`tensortap film`: film one name of a run."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from tensortap.cli.terminal import json_option, message, print_json, progress_bar
from tensortap.core.arguments import parse_steps
from tensortap.core.errors import TensortapError


def film(
    run: str = typer.Argument(..., help="Folder or URL of a run."),
    name: str = typer.Argument(..., help="Name of a record."),
    target: Path = typer.Argument(..., help="out.mp4 or out.gif."),
    mode: str = typer.Option(
        "auto", help="auto, image, surface, histogram, pca or tsne."
    ),
    size: str = typer.Option("640x480", metavar="WxH", help="Size of the frames in pixels."),
    fps: float = typer.Option(20.0, help="Frames per second."),
    colors: str = typer.Option(
        "follow", "--range", metavar="RULE",
        help="follow, or two numbers: --range=-1,1",
    ),
    rank: int | None = typer.Option(None, help="Rank. Default: the lowest."),
    kind: str | None = typer.Option(None, help="Weight, Gradient, …, if there are several."),
    steps: str | None = typer.Option(
        None, metavar="10:20", help="Only these steps, both ends included; also 10: and :20."
    ),
    as_json: bool = json_option("target, frames"),
) -> None:  # fmt: skip
    """Film the tensors that a run holds under one name."""
    from tensortap.rooms.films.recorder import film as make
    from tensortap.runs.run_reader import RunReader

    with progress_bar("filming") as progress:
        frames = make(
            RunReader(run), name, target, rank=rank, kind=kind, steps=parse_steps(steps),
            fps=fps, progress=progress, mode=mode, size=_size(size), range=_range(colors),
        )  # fmt: skip
    if as_json:
        print_json({"target": str(target), "frames": frames})
    message(f"wrote {frames:,} frames to {target}")


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})[x,](\d{1,5})", text)
    if match is None:
        raise TensortapError(f"--size must look like 640x480, got {text!r}")
    return int(match[1]), int(match[2])


def _range(text: str) -> str | tuple[float, float]:
    if "," not in text:
        return text
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise TensortapError(f"--range must be a rule or look like -1,1, got {text!r}") from None
    return low, high
