"""`tensortap export`: a run in another format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tensortap.errors import TensortapError

if TYPE_CHECKING:
    from tensortap.api.run import Run


def export(
    run: Path = typer.Argument(..., help="The folder of a run."),
    target: Path = typer.Argument(..., help="out.npz, out.h5, out.parquet, or a folder out/."),
    names: str | None = typer.Option(None, help="Only names that this regular expression finds."),
    to: str | None = typer.Option(
        None, help="tensorboard or wandb: the statistics, into the folder out/ (nothing is sent)."
    ),
) -> None:
    """Write the tensors of a run to .npz, .h5 or a folder, or its table to .parquet.

    With --to its statistics, for TensorBoard or wandb.
    """
    from rich.console import Console
    from rich.progress import track

    from tensortap.api.export import export as write
    from tensortap.api.run import Run

    if to is not None:
        _to_dashboard(Run(run), target, to, names)
        return

    def progress(items: object, total: int) -> object:
        return track(items, "exporting", total=total, console=Console(stderr=True))  # type: ignore[arg-type]

    count = write(Run(run), target, names=names, progress=progress)
    print(f"tensortap: {count:,} records to {target}", file=sys.stderr)


def _to_dashboard(run: Run, target: Path, to: str, names: str | None) -> None:
    from rich.console import Console

    if to not in ("tensorboard", "wandb"):
        raise TensortapError(f"no export --to {to}: there is tensorboard, and wandb")
    with Console(stderr=True).status("exporting"):
        if to == "tensorboard":
            count = run.to_tensorboard(target, names=names)
            said = f"{count:,} records to {target}: tensorboard --logdir {target}"
        else:
            said = f"written for wandb: wandb sync {run.to_wandb(target, names=names)}"
    print(f"tensortap: {said}", file=sys.stderr)
