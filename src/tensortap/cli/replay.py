"""`tensortap replay`: run a step of a run again, to see what was not recorded."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensortap.cli.terminal import message, print_json
from tensortap.errors import TensortapError

if TYPE_CHECKING:
    from tensortap.provenance.reproduce import Reproduced


def replay(
    run: Path = typer.Argument(..., help="Folder of a run of tap.init(…, blackbox=True)."),
    step: int = typer.Option(..., help="Training step to run again."),
    probe: list[str] = typer.Option(
        ..., help="What to see: a path of tap.trace, a:gradient, or an operation. Repeatable."
    ),
    out: Path = typer.Option(Path("replays"), help="Folder for the run with the values."),
    code: Path | None = typer.Option(
        None, help="Folder of `tensortap reproduce` with the code. Default: the code as it is now."
    ),
    yes: bool = typer.Option(False, "--yes", help="Start the program without asking."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Start the program of a run, run one step again, and write what its probes see."""
    from tensortap.readers.replayable import ReplayableReader
    from tensortap.runs.layout import read_info

    for rank in range(read_info(run).world_size):
        ReplayableReader(run, rank).find(step)  # before anything is started
    with tempfile.TemporaryDirectory(prefix="tensortap_replay_") as work:
        answer = _ask(run.resolve(), step, probe, out.absolute(), code, yes, Path(work))
    if "error" in answer:
        raise TensortapError(answer["error"])
    message(answer["text"])
    _print(Path(answer["run"]), answer, as_json)
    if not answer["same"]:
        raise typer.Exit(1)


def _ask(
    run: Path, step: int, probes: list[str], out: Path, code: Path | None, yes: bool, work: Path
) -> dict[str, Any]:
    """Start the program with a request, and return its answer."""
    from tensortap.sources.replay_request import VARIABLE, ReplayRequest, write_request

    write_request(ReplayRequest(work, out, run, step, tuple(probes)))
    program = _program(run, code, work)
    for text in program.missing:
        message(f"could not restore {text}")
    message(
        f"this will be executed, up to the first step of the black box:\n\n{program.preview()}\n"
    )
    if not yes:
        typer.confirm("tensortap: start it?", abort=True, err=True)
    status = program.start(2, **{VARIABLE: str(work)})
    return _answer(work, status)


def _answer(work: Path, status: int) -> dict[str, Any]:
    """Return the answer of the first rank; the first error if a rank has one."""
    from tensortap.sources.replay_request import answers

    found = answers(work)
    if not found:
        raise TensortapError(
            f"the program ended with status {status} before it called the step of its black box"
        )
    return next((answer for answer in found if "error" in answer), found[0])


def _program(run: Path, code: Path | None, work: Path) -> Reproduced:
    from tensortap.provenance.reproduce import Reproduced, in_place

    if code is None:
        return in_place(run, work)
    script = code / "run.sh"
    if not script.is_file():
        raise TensortapError(f"{code} has no run.sh: make it with `tensortap reproduce {run}`")
    return Reproduced(code, script, (), ())


def _print(path: Path, answer: dict[str, Any], as_json: bool) -> None:
    from tensortap.api.run import Run

    run = Run(path)
    if not as_json:
        print(path)
        run.summary()
        return
    records = [
        {"name": r.name, "kind": r.kind.value, "call": r.call, "dtype": r.dtype, "shape": r.shape}
        for r in run.records()
    ]
    print_json({**answer, "records": records})
