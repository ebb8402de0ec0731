"""`tensortap report`: a run as one HTML file."""

from __future__ import annotations

import sys
from pathlib import Path

import typer


def report(
    run: str = typer.Argument(..., help="The folder of a run, or its URL."),
    out: Path = typer.Argument(..., help="The file to write: out.html."),
) -> None:
    """Write the overview, notable layers, alerts and provenance of a run into one HTML file."""
    from rich.console import Console

    from tensortap.viz.run_report import report as write

    with Console(stderr=True).status("drawing"):
        path = write(run, out)
    print(
        f"tensortap: the report is in {path} ({path.stat().st_size / 1e6:.1f} MB)", file=sys.stderr
    )
