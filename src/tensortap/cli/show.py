"""`tensortap show`: print a run, or one of its values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensortap.cli.terminal import json_option, print_json

if TYPE_CHECKING:
    from tensortap.api.run import Run


def show(
    run: Path = typer.Argument(..., help="Folder of a run."),
    name: str | None = typer.Argument(None, help="Name of a record. Default: summarize the run."),
    step: int | None = typer.Option(None, help="Training step. Default: the latest."),
    rank: int | None = typer.Option(None, help="Rank, if there are several."),
    kind: str | None = typer.Option(None, help="Activation, Gradient, …, if there are several."),
    values: bool = typer.Option(False, help="Also print the value."),
    as_json: bool = json_option(
        "run, title, notes, config, started, ended, crashed, records, ranks, truncated, dropped, "
        "names (name, kind, rank, step, records, latest); of one value: name, kind, step, rank, "
        "call, type, dtype, shape, statistics, lines, value"
    ),
) -> None:
    """Print a run, or one value of it, with one line per tensor."""
    from tensortap.api.run import Run

    opened = Run(run)
    wanted: dict[str, Any] = {"step": step, "rank": rank, "kind": kind}
    if as_json:
        print_json(_run_facts(opened) if name is None else _facts(opened, name, values, **wanted))
        return
    if name is None:
        opened.summary()
        return
    opened.describe(name, **wanted)
    if values:
        print(opened.get(name, **wanted))


def _run_facts(run: Run) -> dict[str, Any]:
    reader, info = run.reader, run.reader.info
    rows = [
        {
            "name": row.head.name, "kind": row.head.kind, "rank": row.head.rank,
            "step": row.head.step, "records": row.records, "latest": row.line,
        }
        for row in run.rows()
    ]  # fmt: skip
    return {
        "run": str(run.path), "title": info.name, "notes": info.notes, "config": info.config,
        "started": info.started, "ended": info.ended, "crashed": info.crashed,
        "records": sum(reader.counts().values()), "ranks": reader.ranks,
        "truncated": sum(reader.truncated.values()), "dropped": len(run.missing()), "names": rows,
    }  # fmt: skip


def _facts(run: Run, name: str, values: bool, **wanted: Any) -> dict[str, Any]:
    from tensortap.runs.reader import find
    from tensortap.text.records import record_details
    from tensortap.values.view import array_of

    record = run._load(find(run.reader, name, **wanted))
    keys = ("name", "kind", "step", "rank", "call", "type", "dtype", "shape")
    found = {key: getattr(record, key) for key in keys} | {"statistics": record.stats}
    found["lines"] = record_details(record).split("\n")[1:]
    if values:
        value = run.get(name, **wanted)
        array = array_of(value)
        found["value"] = value if array is None else array
    return found
