"""The left of the page: what is shown, the names in it, and which tensors are there whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensortap.record import Kind
from tensortap.web.entries import Shown, described
from tensortap.web.responses import Asked

if TYPE_CHECKING:
    from tensortap.table.table import Table

_HELD = 5000  # names with tensors that are told


def library(asked: Asked) -> dict[str, Any]:
    """Everything that can be looked at."""
    asked.place.library.scan()
    return {"shown": [described(shown) for shown in asked.place.library.all()]}


def run(asked: Asked) -> dict[str, Any]:
    """What a run is made of: names with their kinds, ranks, steps, statistics."""
    shown = asked.shown
    table = shown.table()
    with table.lock:
        return _run(shown, table)


def _run(shown: Shown, table: Table) -> dict[str, Any]:
    kinds = table.tensor_kinds()
    of_name: dict[str, list[int]] = {}
    for number, kind in enumerate(kinds):
        for name in table.layers(kind):
            of_name.setdefault(name, []).append(number)
    order = {name: number for number, name in enumerate(table.names)}
    names = sorted(of_name, key=order.__getitem__)
    return {
        **described(shown),
        "records": len(table),
        "kinds": kinds,
        "names": names,
        "name_kinds": [of_name[name] for name in names],
        "ranks": table.ranks(),
        "statistics": table.statistics(),
        "dtypes": [dtype for dtype in table.dtypes if dtype],
        "metrics": table.layers(Kind.METRIC.value),
        "steps": table.steps(),
    }


def held(asked: Asked) -> dict[str, Any]:
    """Which tensors were kept whole, not only their statistics: by name and kind, their steps."""
    found = asked.shown.held()
    rows = [
        {"name": name, "kind": kind, "steps": sorted(steps)}
        for (name, kind), steps in list(found.items())[:_HELD]
    ]
    return {"total": len(found), "held": rows}
