"""`tensortap run`: track a program, and print what is wrong with its training."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensortap.cli.terminal import json_option, message, print_json
from tensortap.core.errors import TensortapError
from tensortap.rooms.health.check import FIELDS, print_rules
from tensortap.rooms.track.budget import parse_budget

if TYPE_CHECKING:
    from tensortap.rooms.program.torch.finding import TrainedModels


def run(
    program: list[str] = typer.Argument(
        ..., metavar="PROGRAM [ARGUMENTS]…", help="A script, or with -m a module."
    ),
    module: bool = typer.Option(False, "-m", help="Run a module, as python -m does."),
    folder: Path = typer.Option(Path("runs"), "--to", help="Folder for the run."),
    every: int | None = typer.Option(None, help="Track everything in each n-th step; no budget."),
    budget: str = typer.Option("", help="Share of the time that tracking may take; default: 5%."),
    idle: bool = typer.Option(
        False, "--idle", help="Be ready for tensortap probe, record nothing."
    ),
    analyses: bool = typer.Option(False, help="Compute norms, updates and more in these steps."),
    show_all: bool = typer.Option(False, "--all", help="Name all rules at the end."),
    view: bool = typer.Option(False, "--view", help="Open the page while the program trains."),
    line: bool = typer.Option(True, "--progress/--no-progress", help="Show a line of progress."),
    as_json: bool = json_option(
        f"run, exit_code, not_seen, rules ({FIELDS}); the program prints to stderr"
    ),
) -> None:
    """Run a training program and track the models that torch optimizers train, with all rules.

    The program needs no change. At the end, print what the rules have found; the exit code is that
    of the program. With several processes: torchrun … -m tensortap run train.py
    """
    from tensortap.core.ranks import rank_and_world_size
    from tensortap.rooms.program.program import run_program
    from tensortap.rooms.program.progress import Progress
    from tensortap.runs.init import init

    if not module and not Path(program[0]).is_file():
        raise TensortapError(f"no file {program[0]}; -m runs a module")
    if every is not None and every < 1:
        raise TensortapError(f"--every must be at least 1, got {every}")
    if (every is not None) + bool(budget) + idle > 1:
        raise TensortapError("choose one of --every, --budget and --idle")
    chosen = budget or os.environ.get("TENSORTAP_BUDGET") or "5%"
    parse_budget(chosen)  # raises if it is none
    progress = Progress(line)
    options: dict[str, Any] = {"alerts": not idle, "shows": progress}
    options |= {"every": 0 if idle else every or 1, "budget": False if idle or every else chosen}
    options |= {"analyses": True} if analyses else {}
    process, path = os.getpid(), init(folder.absolute())
    rank, world_size = rank_and_world_size()
    page = None
    if view and rank == 0:
        words = "-m", "tensortap", "view", str(path)
        page = subprocess.Popen([sys.executable, *words], stdout=2)  # stdout is the program's
    try:
        with _kept_stdout() if as_json else contextlib.nullcontext():
            code, found = run_program(program, path, module=module, options=options)
    finally:
        if os.getpid() == process:  # not in a fork that ends as a program does
            progress.end()
    if os.getpid() == process:
        if page is not None:
            page.terminate()
        try:
            if rank:  # rank 0 prints the verdict on all
                for problem in found.problems if found else ():
                    message(f"{path}: rank {rank}: tracking failed: {problem}")
            else:
                _wait_for_ranks(path, world_size)
                if as_json:
                    print_json({"run": str(path), "exit_code": code} | _seen(path, found))
                else:
                    _report(path, found, show_all)
        except Exception as error:
            with contextlib.suppress(Exception):
                message(f"{path}: cannot report: {error}; see tensortap check {path}")
        try:
            sys.stderr.flush()
        except Exception:  # the program has closed it: Python would exit with 120
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    raise typer.Exit(code)


@contextlib.contextmanager
def _kept_stdout() -> Iterator[None]:
    """Send what a program prints to stderr: stdout is for the answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)  # also for processes that it starts
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _wait_for_ranks(path: Path, world_size: int, seconds: float = 5.0) -> None:
    """Wait until the other ranks have written their records, but not for one that is gone."""
    from tensortap.runs.layout import receipt_file

    end = time.monotonic() + seconds
    others = [receipt_file(path, rank) for rank in range(1, world_size)]
    while not all(file.exists() for file in others) and time.monotonic() < end:
        time.sleep(0.05)


def _seen(path: Path, found: TrainedModels | None) -> dict[str, Any]:
    from tensortap.rooms.health.report import health_of
    from tensortap.runs.run_reader import RunReader
    from tensortap.table.table import table_of

    reader = RunReader(path)
    table = table_of(reader)
    by_others = bool(table.ranks()) and not (found and found.models)  # processes that it started
    not_seen = [] if by_others else list(could_not_look(found))
    return {"not_seen": not_seen, "rules": health_of(table, reader)}


def _report(path: Path, found: TrainedModels | None, show_all: bool) -> None:
    from tensortap.rooms.health.report import health_of, untracked_ranks
    from tensortap.runs.run_reader import RunReader
    from tensortap.table.table import table_of

    reader = RunReader(path)
    table = table_of(reader)
    by_others = bool(table.ranks()) and not (found and found.models)  # processes that it started
    if not by_others:
        for problem in could_not_look(found):
            message(f"{path}: {problem}")
    if missing := untracked_ranks(reader):
        message(f"{path}: {missing}")
    if by_others or (found is not None and found.models):
        rows = health_of(table, reader)
        stepped = by_others or any(model.steps for model in (found.models if found else ()))
        if stepped or any(row.alerts for row in rows):
            print_rules(str(path), rows, stderr=True, show_all=show_all)
            message(f"tensortap view {path}")


# what follows the program belongs to it
run.context_settings = {"allow_interspersed_args": False}  # type: ignore[attr-defined]


def could_not_look(found: TrainedModels | None) -> Iterator[str]:
    """Yield what `tensortap run` did not see of a program, so that nobody takes it for healthy."""
    if found is None:
        yield "the program did not import torch, so nothing was tracked"
        return
    for problem in found.problems:
        yield f"tracking failed: {problem}"
    if found.tracks_itself:
        yield "the program tracks a model by itself, so nothing else was tracked"
    elif not found.models:
        yield "no model was trained with a torch optimizer, so no rule could look at one"
    if found.strays:
        yield f"{found.strays} optimizers train tensors that belong to no module: not tracked"
    if found.untracked:
        yield f"{found.untracked} further models were not tracked: too many are trained at a time"
    for model in found.models:
        if model.waiting:
            yield f"{model.waiting} names had no turn within the budget; --every 1 looks at all"
        if model.norm_period > 1.5:
            yield f"gradient_norm fits into the budget every {model.norm_period:.0f} steps only"
        if not model.steps:
            yield "no step of an optimizer was seen, so rules over steps could not look"
        elif not model.losses:
            yield "no loss was seen: backward() was called on no tensor with one value"
