"""`tensortap run`: run a training program without a change to it, and track its models."""

from __future__ import annotations

from pathlib import Path

import typer

from tensortap.cli.terminal import message
from tensortap.core.errors import TensortapError


def run(
    program: list[str] = typer.Argument(
        ..., metavar="PROGRAM [ARGUMENTS]…", help="A script, or with -m a module."
    ),
    module: bool = typer.Option(False, "-m", help="Run a module, as python -m does."),
    folder: Path = typer.Option(Path("runs"), "--to", help="Folder for the run."),
    every: int = typer.Option(1, help="Track each n-th step."),
    analyses: bool = typer.Option(False, help="Compute norms, updates and more in these steps."),
) -> None:
    """Run a training program and track the models that torch optimizers train, with all rules.

    The program needs no change. At the end, print what the rules have found; the exit code is that
    of the program. With several processes: torchrun … -m tensortap run train.py
    """
    from rich.console import Console

    from tensortap.rooms.health.program import run_program
    from tensortap.rooms.health.report import health_text, summary_of
    from tensortap.rooms.health.rule_health import health_of
    from tensortap.runs.run_reader import RunReader
    from tensortap.table.table import table_of

    if not module and not Path(program[0]).is_file():
        raise TensortapError(f"no file {program[0]}; -m runs a module")
    if every < 1:
        raise TensortapError(f"--every must be at least 1, got {every}")
    options = {"alerts": True, "every": every, "analyses": analyses}
    path, code, models = run_program(program, module=module, folder=folder, options=options)
    if models:
        reader = RunReader(path)
        rows = health_of(table_of(reader), reader)
        message(f"{path}: {summary_of(rows)}")
        Console(stderr=True).print(health_text(rows), soft_wrap=True, end="")
    else:
        message(f"{path}: no model was trained with a torch optimizer that tensortap could find")
    raise typer.Exit(code)


# what follows the program belongs to it
run.context_settings = {"allow_interspersed_args": False}  # type: ignore[attr-defined]
