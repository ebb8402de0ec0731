"""`tensortap compare`: two runs or two files, and where they first differ."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensortap.cli.progress import progress_bar
from tensortap.errors import NotFound, TensortapError
from tensortap.select import parse_steps

if TYPE_CHECKING:
    from tensortap.compare.report import Report
    from tensortap.compare.result import Comparison

_RUNS = "Runs"  # what only runs have, in the help


def compare(
    a: str = typer.Argument(..., help="The folder of a run, or a file."),
    b: str = typer.Argument(..., help="What it should be like: another run, or another file."),
    atol: float = typer.Option(1e-8, help="Close is |a - b| <= atol + rtol*|b|."),
    rtol: float = typer.Option(1e-5, help="The relative part of the tolerance."),
    trust: bool = typer.Option(
        False, "--trust", help="Load pickles of any class: they may run code."
    ),
    rules: Path | None = typer.Option(
        None, help="A TOML file: which names have to be how close.", rich_help_panel=_RUNS
    ),
    mapping: list[str] = typer.Option(
        [], "--map", metavar="OLD=NEW", rich_help_panel=_RUNS,
        help=r"Names of A as B spells them: 'old\.(.*)=new.\1'. Any number of times.",
    ),
    steps: str | None = typer.Option(
        None, metavar="10:20", help="Only these steps, both included; 10: and :20 too.",
        rich_help_panel=_RUNS,
    ),
    names: str | None = typer.Option(
        None, metavar="REGEX", help="Only names that this finds.", rich_help_panel=_RUNS
    ),
    kinds: str | None = typer.Option(
        None, metavar="KIND,…", help="Only Activation, Gradient, Weight, …", rich_help_panel=_RUNS
    ),
    ranks: str | None = typer.Option(
        None, metavar="0,1", help="Only these ranks.", rich_help_panel=_RUNS
    ),
    allow_missing: bool = typer.Option(
        False, "--allow-missing", help="What only one side has is no difference.",
        rich_help_panel=_RUNS,
    ),
    noise: tuple[str, str] = typer.Option(
        ("", ""), metavar="RUN1 RUN2", show_default=False, rich_help_panel=_RUNS,
        help="Two runs of the code of A: what they are apart is no difference.",
    ),
    processes: int = typer.Option(
        0, min=0, help="Compare in so many processes; else in threads.", rich_help_panel=_RUNS
    ),
    rows: int = typer.Option(30, min=1, help="So many differences are printed."),
    as_json: bool = typer.Option(False, "--json", help="All of it, as JSON."),
    html: Path | None = typer.Option(
        None, help="Write a report too: one HTML file, to be opened anywhere.",
        rich_help_panel=_RUNS,
    ),
) -> None:  # fmt: skip
    """Compare two runs or two files; ends with 0 if they agree, with 1 if they differ."""
    from tensortap.compare.api import compare as look

    options = _for_runs(
        rules=rules, mapping=mapping, steps=parse_steps(steps), names=names, kinds=_kinds(kinds),
        ranks=_ranks(ranks), allow_missing=allow_missing, noise=_noise(*noise),
    )  # fmt: skip
    of_runs = _is_run(a) or _is_run(b)
    if not of_runs and (options or html is not None or processes):
        given = ["--html"] * (html is not None) + ["--processes"] * bool(processes)
        given += [f"--{_FLAGS.get(name, name)}" for name in options]
        _check_files(a, b)
        raise TensortapError(f"{', '.join(given)}: only for runs, and neither of these is one")
    if html is not None:
        _check_writable(html)
    with contextlib.ExitStack() as stack:
        if of_runs:
            options["progress"] = stack.enter_context(progress_bar("comparing"))
            options["executor"] = stack.enter_context(_executor(processes))
        found = look(_place(a), _place(b), atol=atol, rtol=rtol, trust=trust, **options)
    if html is not None:
        from tensortap.compare.html import write_html

        with progress_bar("drawing") as progress:
            write_html(found, html, progress=progress)
        print(f"tensortap: the report is in {html}", file=sys.stderr)
    _print(found, a, b, rows, as_json)
    raise typer.Exit(0 if found else 1)


def _print(found: Report | Comparison, a: str, b: str, rows: int, as_json: bool) -> None:
    from tensortap.compare.report import Report

    if as_json:
        import json

        from tensortap.compare.json_report import comparison_as_json, report_as_json

        runs = isinstance(found, Report)
        said = report_as_json(found) if runs else comparison_as_json(found, a, b)  # type: ignore[arg-type]
        json.dump(said, sys.stdout, indent=1)
        print()
        return
    from rich.console import Console

    from tensortap.compare.text import comparison_text, report_text

    text = (
        report_text(found, rows)
        if isinstance(found, Report)
        else comparison_text(found, a, b, rows)
    )
    Console(highlight=False).print(text)


_FLAGS = {"mapping": "map", "allow_missing": "allow-missing"}


def _for_runs(**options: Any) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in options.items() if value}


def _place(text: str) -> Any:
    # a Path, so that a name without a suffix is not taken for a text to compare
    return text if "://" in text else Path(text)


def _is_run(text: str) -> bool:
    from tensortap.compare.files import is_run

    return is_run(_place(text))


def _check_files(*texts: str) -> None:
    """That they exist is said before what they are."""
    for text in texts:
        path = Path(text)
        if "://" not in text and not path.exists():
            raise NotFound(f"no such file: {path}")
        if path.is_dir():
            raise TensortapError(f"{path} is a folder, and not that of a run: it has no run.json")


def _check_writable(path: Path) -> None:
    """A comparison may take long: what cannot be written is said before it."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise TensortapError(f"--html: {path} cannot be written")


def _noise(*runs: str) -> tuple[Any, ...] | None:
    if not any(runs):
        return None
    for run in runs:
        if not _is_run(run):
            raise TensortapError(f"--noise takes two runs, and {run} is none")
    return tuple(map(_place, runs))


def _kinds(text: str | None) -> tuple[str, ...]:
    from tensortap.record import Kind

    there = {kind.value.lower(): kind.value for kind in Kind}
    found = []
    for word in filter(None, (text or "").split(",")):
        kind = there.get(word.strip().lower())
        if kind is None:
            raise TensortapError(f"no kind is called {word!r}: {', '.join(there.values())}")
        found.append(kind)
    return tuple(found)


def _ranks(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in filter(None, (text or "").split(",")))
    except ValueError:
        raise TensortapError(f"--ranks is like 0,1, not {text!r}") from None


@contextlib.contextmanager
def _executor(processes: int) -> Iterator[Executor | None]:
    if not processes:
        yield None
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # not forked: this process has threads
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as executor:
        yield executor
