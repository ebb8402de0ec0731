"""`tensortap export`: a run in another format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tensortap.cli.terminal import message
from tensortap.core.errors import TensortapError

if TYPE_CHECKING:
    from tensortap.api.run import Run


def export(
    run: Path = typer.Argument(..., help="Folder of a run."),
    target: Path = typer.Argument(..., help="out.npz, out.parquet, or a folder out/."),
    names: str | None = typer.Option(None, help="Only names that match this regular expression."),
    to: str | None = typer.Option(
        None, help="tensorboard or wandb: write statistics to the folder out/. Nothing is sent."
    ),
) -> None:
    """Export the tensors of a run to .npz or a folder, or its table to .parquet.

    With --to, export its statistics for TensorBoard or wandb.
    """
    from rich.console import Console
    from rich.progress import track

    from tensortap.api.run import Run
    from tensortap.rooms.export.export import export as write

    if to is not None:
        _to_dashboard(Run(run), target, to, names)
        return

    def progress(items: object, total: int) -> object:
        return track(items, "exporting", total=total, console=Console(stderr=True))  # type: ignore[arg-type]

    count = write(Run(run), target, names=names, progress=progress)
    message(f"wrote {count:,} records to {target}")


def _to_dashboard(run: Run, target: Path, to: str, names: str | None) -> None:
    from rich.console import Console

    if to not in ("tensorboard", "wandb"):
        raise TensortapError(f"--to must be tensorboard or wandb, got {to!r}")
    with Console(stderr=True).status("exporting"):
        if to == "tensorboard":
            count = run.to_tensorboard(target, names=names)
            text = f"wrote {count:,} records; show them with: tensorboard --logdir {target}"
        else:
            text = f"wrote a run; upload it with: wandb sync {run.to_wandb(target, names=names)}"
    message(text)
