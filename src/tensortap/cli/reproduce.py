"""`tensortap reproduce`: a folder in which a run can be started again."""

from __future__ import annotations

import sys
from pathlib import Path

import typer


def reproduce(
    run: Path = typer.Argument(..., help="The folder of a run."),
    out: Path | None = typer.Option(None, help="The folder to make; else RUN_reproduced here."),
    repo: str | None = typer.Option(
        None, help="A clone of the project, or its address, if it is not where it was."
    ),
    version: int | None = typer.Option(
        None, help="Which state of the code, if it changed during the run; else the first."
    ),
    start: bool = typer.Option(False, "--run", help="Start it, with the Python of tensortap."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
) -> None:
    """Make a folder with the code, the packages, the environment and the command of a run."""
    from tensortap.provenance.reproduce import reproduce as make

    made = make(run, out, repo=repo, version=version, say=_say)
    if as_json:
        import json

        found = {
            "folder": str(made.folder),
            "script": str(made.script),
            "missing": made.missing,
            "notes": made.notes,
        }
        print(json.dumps(found, indent=1))
    else:
        print(made.folder, flush=True)
    for text in made.missing:
        _say(f"could not restore {text}")
    for text in made.notes:
        _say(text)
    if start:
        raise typer.Exit(made.start())
    _say(f"start it with: sh {made.script}")


def _say(text: str) -> None:
    print(f"tensortap: {text}", file=sys.stderr)
