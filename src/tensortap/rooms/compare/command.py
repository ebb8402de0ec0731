"""`tensortap compare`: where two runs or files first differ."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from tensortap.cli.terminal import json_option, message, parse_numbers, print_json, progress_bar
from tensortap.core.arguments import parse_steps
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.rooms import offer

_RUNS = "Runs"  # heading of the options for runs


def compare(
    a: str = typer.Argument(..., help="Folder of a run, or a file."),
    b: str = typer.Argument(..., help="The reference: another run, or another file."),
    atol: float | None = typer.Option(
        None, help="Close is |a - b| <= atol + rtol*|b|; default 1e-8, and 0 for integers."
    ),
    rtol: float | None = typer.Option(None, help="Default 1e-5, and 0 for integers."),
    trust: bool = typer.Option(
        False, "--trust", help="Load pickles of any class, which may run code."
    ),
    rules: Path | None = typer.Option(
        None, help="TOML file with tolerances per name.", rich_help_panel=_RUNS
    ),
    mapping: list[str] = typer.Option(
        [], "--map", metavar="OLD=NEW", rich_help_panel=_RUNS,
        help=r"Rename names of A to those of B: 'old\.(.*)=new.\1'. Repeatable.",
    ),
    steps: str | None = typer.Option(
        None, metavar="10:20", help="Only these steps, both ends included; also 10: and :20.",
        rich_help_panel=_RUNS,
    ),
    names: str | None = typer.Option(
        None, metavar="REGEX", help="Only names that match.", rich_help_panel=_RUNS
    ),
    kinds: str | None = typer.Option(
        None, metavar="KIND,…", help="Only Activation, Gradient, Weight, …", rich_help_panel=_RUNS
    ),
    ranks: str | None = typer.Option(
        None, metavar="0,1", help="Only these ranks.", rich_help_panel=_RUNS
    ),
    allow_missing: bool = typer.Option(
        False, "--allow-missing", help="Ignore records that only one side has.",
        rich_help_panel=_RUNS,
    ),
    dask: str | None = typer.Option(
        None, metavar="tcp://host:8786", rich_help_panel=_RUNS,
        help="Use the workers of a Dask cluster, for compacted runs.",
    ),
    tolerance: str | None = typer.Option(
        None, metavar="auto", rich_help_panel=_RUNS,
        help="Tell bugs from rounding by the run with perturbed inputs beside B.",
    ),
    noise: Path | None = typer.Option(
        None, help="That run, if it is elsewhere.", rich_help_panel=_RUNS
    ),
    rows: int = typer.Option(30, min=1, help="Number of differences to print."),
    as_json: bool = json_option(
        "format, of, agree, a, b; of runs: compared, equal, by_statistics, ignored, allow_missing, "
        "culprit, atol, rtol, provenance, first, ranks, first_bitwise, unplaced, differences, "
        "missing; of files: comparison"
    ),
    html: Path | None = typer.Option(
        None, help="Also write a report: one self-contained HTML file.",
        rich_help_panel=_RUNS,
    ),
) -> None:  # fmt: skip
    """Compare two runs or two files; exit with 0 if they agree, 1 if they differ."""
    from tensortap.rooms.compare.api import compare as compare_sides
    from tensortap.rooms.compare.api import is_run
    from tensortap.rooms.compare.report import CompareReport
    from tensortap.rooms.compare.result import Comparison

    options: dict[str, Any] = {
        "rules": rules, "mapping": mapping, "steps": parse_steps(steps), "names": names,
        "kinds": _kinds(kinds), "ranks": parse_numbers(ranks or "", "--ranks", "0,1"),
        "allow_missing": allow_missing, "tolerance": tolerance, "noise": noise,
    }  # fmt: skip
    options = {name: value for name, value in options.items() if value}
    # a Path, so that a name without a suffix is not compared as text
    sides = [side if "://" in side else Path(side) for side in (a, b)]
    of_runs = any(map(is_run, sides))
    if not of_runs and (options or html is not None or dask is not None):
        given = ["html"] * (html is not None) + ["dask"] * (dask is not None)
        given += [_FLAGS.get(name, name) for name in options]
        raise TensortapError(f"--{', --'.join(given)}: for runs only, and neither is a run")
    if html is not None:
        _check_writable(html)
    with contextlib.ExitStack() as stack:
        if of_runs:
            if dask is not None:
                options["executor"] = stack.enter_context(offer("executor.dask")(dask))
            options["progress"] = stack.enter_context(progress_bar("comparing"))
        found: Any = compare_sides(*sides, atol=atol, rtol=rtol, trust=trust, **options)
    chosen = [f"--{name}" for name in ("steps", "names", "kinds", "ranks") if name in options]
    if (
        of_runs
        and chosen
        and tolerance is None
        and not (found.compared or found.missing or found.unplaced)
    ):
        raise NotFound(f"{' and '.join(chosen)}: neither run has a record that fits")
    if html is not None:
        from tensortap.rooms.compare.html import write_html

        write_html(getattr(found, "report", found), html)
        message(f"wrote the report to {html}")
    if as_json:
        from tensortap.rooms.compare.result import comparison_as_json

        is_own = isinstance(found, Comparison)
        print_json(comparison_as_json(found, a, b) if is_own else found.to_json())
    else:
        from tensortap.rooms.compare.text import comparison_text, report_text

        text: Any = str(found)  # of another room
        if isinstance(found, CompareReport):
            text = report_text(found, rows)
        elif isinstance(found, Comparison):
            text = comparison_text(found, a, b, rows)
        Console(highlight=False, markup=False).print(text)
    raise typer.Exit(0 if found else 1)


_FLAGS = {"mapping": "map", "allow_missing": "allow-missing"}


def _check_writable(path: Path) -> None:
    """Raise if the report cannot be written, before a long comparison starts."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise TensortapError(f"--html: cannot write {path}")


def _kinds(text: str | None) -> tuple[str, ...]:
    from tensortap.runs.reader import parse_kind

    words = [word.strip() for word in (text or "").split(",")]
    return tuple(parse_kind(word).value for word in words if word)
