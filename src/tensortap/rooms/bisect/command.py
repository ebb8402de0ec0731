"""`tensortap bisect`: every module of a program that computes something else than a reference."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tensortap.cli.terminal import json_option, message, print_json
from tensortap.core.errors import TensortapError

if TYPE_CHECKING:
    from tensortap.rooms.bisect.bisect import BisectOptions
    from tensortap.rooms.bisect.faulty_modules import BisectReport, FaultyModule


def bisect(
    run: str = typer.Argument(..., help="The reference: a run with tensors."),
    command: list[str] = typer.Argument(..., metavar="-- COMMAND…", help="A training program."),
    step: int | None = typer.Option(None, help="The step to judge. Default: the first."),
    atol: float | None = typer.Option(
        None, help="Close is |a - b| <= atol + rtol*|b|; default 1e-8, and 0 for integers."
    ),
    rtol: float | None = typer.Option(None, help="Default 1e-5, and 0 for integers."),
    mapping: list[str] = typer.Option(
        [], "--map", metavar="OLD=NEW",
        help=r"Rename modules of the program to those of the run: 'old\.(.*)=new.\1'. Repeatable.",
    ),
    as_json: bool = json_option(
        "format, of, agree, reference, step, faults (module, phase, what, others, explanations, "
        "count, ranks, comparison), unsure, judged, unjudged, notes"
    ),
) -> None:  # fmt: skip
    """Run a program until the step ends, and print its faulty modules; exit with 1 if any.

    Its first tap.track(model, …) names the model. Recorded values take the place of computed ones.
    """
    from rich.console import Console

    from tensortap.rooms.bisect.bisect import BisectOptions
    from tensortap.rooms.bisect.recorded_step import RecordedStep
    from tensortap.rooms.compare.compared_run import ComparedRun

    where = run if "://" in run else str(Path(run).absolute())
    options = BisectOptions(where, step, tuple(mapping), atol, rtol)
    options.check()  # before anything starts
    number = RecordedStep(ComparedRun(where), step).step
    report = _of_all_ranks(_execute(command, options._replace(step=number)))
    if as_json:
        print_json(report.to_json())
    else:
        Console(highlight=False).print(report)
    raise typer.Exit(0 if report else 1)


def _execute(command: list[str], options: BisectOptions) -> dict[int, BisectReport]:
    """Run the program until the step has been judged; return the report of each rank."""
    from tensortap.rooms.bisect.tracked import FOLDER, read_reports, write_options

    with tempfile.TemporaryDirectory(prefix="tensortap") as name:
        folder = Path(name)
        write_options(folder, options)
        try:
            # stdout is for the report
            ended = subprocess.run(command, env={**os.environ, FOLDER: name}, stdout=2, check=False)
        except OSError as error:
            raise TensortapError(f"cannot start {command[0]}: {error.strerror}") from None
        reports = read_reports(folder)
    errors = [each for each in reports.values() if isinstance(each, str)]
    found = {rank: each for rank, each in reports.items() if not isinstance(each, str)}
    if errors or not found:
        raise TensortapError(
            errors[0] if errors else
            f"the program ended with {ended.returncode} before step {options.step}: it has to "
            "track its model, with tap.track(model, …) as tracker, and call tracker.step()"
        )  # fmt: skip
    if ended.returncode:
        message(f"the program ended with {ended.returncode}")
    return found


def _of_all_ranks(found: dict[int, BisectReport]) -> BisectReport:
    """Return one report: every fault once, with the ranks that have it."""
    first = found[min(found)]
    if len(found) == 1:
        return first

    def joined(name: str) -> tuple[FaultyModule, ...]:
        ranks: dict[str, list[int]] = {}
        faults: dict[str, FaultyModule] = {}
        for rank, report in sorted(found.items()):
            for each in getattr(report, name):
                faults.setdefault(each.module, each)
                ranks.setdefault(each.module, []).append(rank)
        return tuple(
            dataclasses.replace(each, ranks=tuple(ranks[module])) for module, each in faults.items()
        )

    return dataclasses.replace(first, faults=joined("faults"), unsure=joined("unsure"))
