"""`tensortap reproduce`: prepare a folder in which a run can be started again."""

from __future__ import annotations

from pathlib import Path

import typer

from tensortap.cli.terminal import json_option, message, print_json


def reproduce(
    run: Path = typer.Argument(..., help="Folder of a run."),
    out: Path | None = typer.Option(None, help="Folder to create. Default: RUN_reproduced here."),
    repo: str | None = typer.Option(None, help="Clone or address of the project, if it has moved."),
    as_json: bool = json_option("folder, script, missing, notes"),
) -> None:
    """Create a folder with the code, packages, environment and command of a run."""
    from tensortap.rooms.provenance.reproduction import reproduce as make

    made = make(run, out, repo=repo, say=message)
    if as_json:
        print_json(
            {
                "folder": str(made.folder),
                "script": str(made.script),
                "missing": made.missing,
                "notes": made.notes,
            }
        )
    else:
        print(made.folder, flush=True)
    for text in made.missing:
        message(f"could not restore {text}")
    for text in made.notes:
        message(text)
    message(f"start it with: sh {made.script}")
