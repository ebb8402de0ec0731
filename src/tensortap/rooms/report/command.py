"""`tensortap report`: write a run as one HTML file."""

from __future__ import annotations

from pathlib import Path

import typer

from tensortap.cli.terminal import json_option, message, print_json


def report(
    run: str = typer.Argument(..., help="Folder or URL of a run."),
    out: Path = typer.Argument(..., help="File to write: out.html."),
    as_json: bool = json_option("target, nbytes"),
) -> None:
    """Write the overview, notable layers, alerts and provenance of a run into one HTML file."""
    from rich.console import Console

    from tensortap.rooms.report.run_report import report as write

    with Console(stderr=True).status("drawing"):
        path = write(run, out)
    if as_json:
        print_json({"target": str(path), "nbytes": path.stat().st_size})
    message(f"wrote the report to {path} ({path.stat().st_size / 1e6:.1f} MB)")
