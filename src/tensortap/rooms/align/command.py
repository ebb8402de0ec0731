"""`tensortap align`: the same tokens in two runs."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from tensortap.cli.terminal import json_option, message, print_json
from tensortap.core.errors import TensortapError
from tensortap.core.files import plain


def align(
    a: Path = typer.Argument(..., help="Folder of the trainer's run."),
    b: Path = typer.Argument(..., help="Folder of the engine's run."),
    noise: Path | None = typer.Option(
        None, help="A rerun of A in another batch layout: such differences are rounding."
    ),
    names: list[str] = typer.Option(
        [], "--map", metavar="A=B", help="A name of A, and what it is called in B. Repeatable."
    ),
    as_json: bool = json_option(
        "a, b, agree, verdict, tokens_a, tokens_b, matched, unknown, logprobs, first, reasons, "
        "worst, names"
    ),
    html: Path | None = typer.Option(None, help="Also write a report: one HTML file."),
) -> None:
    """Match two runs token by token; exit with 0 if at most rounding differs, else with 1.

    Both runs need values that were captured with tokens=. With 2, they have no tokens in common.
    """
    from tensortap.rooms.align.align import align as align_runs

    pairs = [each.partition("=") for each in names]
    if wrong := [each for each, pair in zip(names, pairs, strict=True) if not all(pair)]:
        raise TensortapError(f"--map: {wrong[0]!r} is not A=B")
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise TensortapError(f"--html: cannot write {html}")
    if noise is not None and not noise.is_dir():
        raise TensortapError(f"--noise: no such run: {noise}")
    found = align_runs(a, b, noise=noise, names={old: new for old, _, new in pairs})
    if not found.matched:
        raise TensortapError(f"{a} and {b} have no tokens with equal contexts in common")
    if html is not None:
        message(f"wrote the report to {found.to_html(html)}")
    if as_json:
        print_json(found.to_json())
    else:
        lines = (plain(line, 400) for line in repr(found).splitlines())
        Console(highlight=False, markup=False, soft_wrap=True).print("\n".join(lines))
    raise typer.Exit(0 if found else 1)
