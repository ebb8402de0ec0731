"""What the room adds."""

from pathlib import Path

import typer

import tensortap as tap
from tensortap.core.record import Record
from tensortap.page.responses import PageRequest, PageRoute


def all_zero(record: Record, state: object) -> str | None:
    """Report tensors of which every element is 0."""
    stats = record.stats
    return "all elements are 0" if stats is not None and stats.zeros == stats.count else None


def greet(run: Path = typer.Argument(help="Folder of a run.")) -> None:
    """Print how many names a run has."""
    print(f"hello, {len(tap.open(run).names())} names")


def names(request: PageRequest) -> dict[str, int]:
    """Answer the tab: how many names there are."""
    return {"names": len(request.entry.table().names)}


RULES = (all_zero,)
ROUTES = (PageRoute("greeting", names),)
