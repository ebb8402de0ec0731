"""The left side of the page: runs and live sessions, their names, and which tensors were kept."""

from __future__ import annotations

from typing import Any

from tensortap.web.catalog_entries import describe_entry
from tensortap.web.responses import PageRequest

_MAX_TENSORS = 5000


def catalog(request: PageRequest) -> dict[str, Any]:
    """Return all runs and live sessions."""
    request.context.catalog.scan()
    return {"entries": [describe_entry(entry) for entry in request.context.catalog.entries()]}


def run(request: PageRequest) -> dict[str, Any]:
    """Return the names of a run with their kinds, its ranks, steps and statistics."""
    entry = request.entry
    table = entry.table()
    with table.lock:
        kinds = table.tensor_kinds()
        kinds_of: dict[str, list[int]] = {}
        for number, kind in enumerate(kinds):
            for name in table.layers(kind):
                kinds_of.setdefault(name, []).append(number)
        names = [name for name in table.names if name in kinds_of]
        return {
            **describe_entry(entry),
            "records": len(table),
            "kinds": kinds,
            "names": names,
            "name_kinds": [kinds_of[name] for name in names],
            "ranks": table.ranks(),
            "statistics": table.statistics(),
            "steps": table.steps(),
        }


def tensor_steps(request: PageRequest) -> dict[str, Any]:
    """Return which tensors were kept whole: names, kinds and steps."""
    tensors = [
        {"name": name, "kind": kind, "steps": sorted(steps)}
        for (name, kind), steps in request.entry.tensor_steps().items()
    ]
    return {"total": len(tensors), "tensors": tensors[:_MAX_TENSORS]}
