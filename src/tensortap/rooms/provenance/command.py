"""`tensortap reproduce`: prepare a folder in which a run can be started again."""

from __future__ import annotations

from pathlib import Path

import typer

from tensortap.cli.terminal import message, print_json


def reproduce(
    run: Path = typer.Argument(..., help="Folder of a run."),
    out: Path | None = typer.Option(None, help="Folder to create. Default: RUN_reproduced here."),
    repo: str | None = typer.Option(None, help="Clone or address of the project, if it has moved."),
    start: bool = typer.Option(False, "--run", help="Show what will be executed, ask, and start."),
    yes: bool = typer.Option(False, "--yes", help="Start without asking, for scripts."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Create a folder with the code, packages, environment and command of a run."""
    from tensortap.rooms.provenance.reproduction import reproduce as make

    made = make(run, out, repo=repo, say=message)
    if as_json:
        result = {
            "folder": str(made.folder),
            "script": str(made.script),
            "missing": made.missing,
            "notes": made.notes,
        }
        print_json(result)
    else:
        print(made.folder, flush=True)
    for text in made.missing:
        message(f"could not restore {text}")
    for text in made.notes:
        message(text)
    if start:
        message(f"this will be executed:\n\n{made.preview()}\n")
        if not yes:
            typer.confirm("tensortap: start it?", abort=True, err=True)
        raise typer.Exit(made.start())
    message(f"start it with: sh {made.script}")
