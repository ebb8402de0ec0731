"""Values and descriptions from any reader: get, get_all, describe."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tensortap import frameworks
from tensortap.errors import NotFound
from tensortap.readers.reader import Reader, find, find_all, kept_value
from tensortap.record import Kind, Record
from tensortap.text.records import plain, record_details
from tensortap.text.tensors import styled

Build = Callable[[Record], Any]
"""Returns the value of a record that has not been loaded yet."""


def get(
    reader: Reader,
    name: str,
    index: int = 0,
    *,
    step: int | None = None,
    rank: int | str | None = None,
    kind: Kind | str | None = None,
    build: Build | None = None,
) -> Any:
    """Return a value as a copy; with ``rank="all"`` a dict of the values of all ranks."""
    build = build or functools.partial(_build, reader)
    if rank == "all":
        ranks = sorted({r.rank for r in find_all(reader, name, step=step, kind=kind)})
        return {r: build(find(reader, name, index, step=step, rank=r, kind=kind)) for r in ranks}
    if isinstance(rank, str):
        raise NotFound(f"rank must be a number or 'all', got {rank!r}")
    return build(find(reader, name, index, step=step, rank=rank, kind=kind))


def get_all(
    reader: Reader,
    name: str,
    *,
    rank: int | None = None,
    kind: Kind | str | None = None,
    build: Build | None = None,
) -> list[Any]:
    """Return all values of a name, oldest to newest."""
    build = build or functools.partial(_build, reader)
    return [build(record) for record in find_all(reader, name, rank=rank, kind=kind)]


def _build(reader: Reader, record: Record) -> Any:
    return frameworks.rebuild(kept_value(reader.load(record)))


def describe(
    reader: Reader,
    name: str,
    index: int = 0,
    *,
    step: int | None = None,
    rank: int | None = None,
    kind: Kind | str | None = None,
    evicted: int = 0,
    load: Callable[[Record], Record] | None = None,
) -> None:
    """Print a record with one line per leaf of its value, and how many records its name has."""
    from rich.console import Console
    from rich.text import Text

    record = (load or reader.load)(find(reader, name, index, step=step, rank=rank, kind=kind))
    head, *lines = record_details(record).split("\n")
    console = Console()
    console.print(Text(plain(head), style="bold"))
    for line in lines:
        console.print(styled(plain(line)))
    records = find_all(reader, name, rank=record.rank, kind=record.kind)
    summary = f"  {len(records)} {'record' if len(records) == 1 else 'records'}"
    if len(records) > 1:
        summary += f", steps {records[0].step} to {records[-1].step}"
    if evicted:
        summary += f"; {evicted} evicted"
    console.print(summary, style="dim", highlight=False)
