"""`tensortap export`: a run in another format."""

from __future__ import annotations

from pathlib import Path

import typer

from tensortap.cli.terminal import message


def export(
    run: Path = typer.Argument(..., help="Folder of a run."),
    target: Path = typer.Argument(..., help="out.npz, out.parquet, or a folder out/."),
    names: str | None = typer.Option(None, help="Only names that match this regular expression."),
) -> None:
    """Export the tensors of a run to .npz or a folder, or its table to .parquet."""
    from rich.console import Console
    from rich.progress import track

    from tensortap.api.run import Run
    from tensortap.rooms.export.export import export as write

    def progress(items: object, total: int) -> object:
        return track(items, "exporting", total=total, console=Console(stderr=True))  # type: ignore[arg-type]

    count = write(Run(run), target, names=names, progress=progress)
    message(f"wrote {count:,} records to {target}")
