"""`tensortap export`: a run in another format."""

from __future__ import annotations

import sys
from pathlib import Path

import typer


def export(
    run: Path = typer.Argument(..., help="The folder of a run."),
    target: Path = typer.Argument(..., help="out.npz, out.h5, out.parquet, or a folder out/."),
    names: str | None = typer.Option(None, help="Only names that this regular expression finds."),
) -> None:
    """Write the tensors of a run to .npz, .h5 or a folder, or its table to .parquet."""
    from rich.console import Console
    from rich.progress import track

    from tensortap.console.export import export as write
    from tensortap.console.run import Run

    def progress(items: object, total: int) -> object:
        return track(items, "exporting", total=total, console=Console(stderr=True))  # type: ignore[arg-type]

    count = write(Run(run), target, names=names, progress=progress)
    print(f"tensortap: {count:,} records to {target}", file=sys.stderr)
