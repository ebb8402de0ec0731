"""What can be asked of any reader: values, and what they look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensortap import frameworks as arrays
from tensortap.api import tables
from tensortap.errors import NotFound
from tensortap.readers.reader import Reader, find, find_all, kept_value
from tensortap.record import Kind, Record
from tensortap.text.records import record_details
from tensortap.text.tensors import styled


def get(
    reader: Reader,
    name: str,
    index: int = 0,
    *,
    step: int | None = None,
    rank: int | str | None = None,
    kind: Kind | str | None = None,
) -> Any:
    """A value, the caller's to change; with ``rank="all"`` a dict of those of all ranks."""
    if rank == "all":
        ranks = sorted({r.rank for r in find_all(reader, name, step=step, kind=kind)})
        return {r: get(reader, name, index, step=step, rank=r, kind=kind) for r in ranks}
    record = find(reader, name, index, step=step, rank=rank_number(rank), kind=kind)
    return arrays.rebuild(kept_value(reader.load(record)))


def rank_number(rank: int | str | None) -> int | None:
    """A rank that is not ``"all"``."""
    if isinstance(rank, str):
        raise NotFound(f"a rank is a number or 'all', not {rank!r}")
    return rank


def get_all(
    reader: Reader, name: str, *, rank: int | None = None, kind: Kind | str | None = None
) -> list[Any]:
    """All values that are held under a name, oldest to newest."""
    found = find_all(reader, name, rank=rank, kind=kind)
    return [arrays.rebuild(kept_value(reader.load(record))) for record in found]


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
    """Print what is held under a name, and one capture in a line a tensor."""
    from rich.console import Console
    from rich.text import Text

    record = (load or reader.load)(find(reader, name, index, step=step, rank=rank, kind=kind))
    head, *lines = record_details(record).split("\n")
    console = Console()
    console.print(Text(tables.plain(head), style="bold"))
    for line in lines:
        console.print(styled(tables.plain(line)))
    held = find_all(reader, name, rank=record.rank, kind=record.kind)
    tail = f"  {len(held)} held"
    if len(held) > 1:
        tail += f", steps {held[0].step} to {held[-1].step}"
    console.print(f"{tail}; {evicted} made room" if evicted else tail, style="dim", highlight=False)
