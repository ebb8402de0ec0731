"""The curves that are always in sight: training statistics, or what comes nearest to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.record import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.table.table import Table

_CAUGHT = 2


def curves(
    table: Table, rank: int | None = None
) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Name → steps and values: of ``tracker.step(loss=…)``, else single numbers that were caught.

    Of the latter, and those that were traced, a few, those that are called a loss first.
    """
    with table.lock:
        found = table.metrics(rank)
        if found or not table.has("value"):
            return found
        value = table.column("value")
        named = {
            name: kind
            for kind in (Kind.LOCAL.value, Kind.VALUE.value)
            for name in _single(table, kind, value)
        }
        names = sorted(named, key=lambda name: ("loss" not in name.lower(), name))
        return {name: _curve(table, named[name], name, rank, value) for name in names[:_CAUGHT]}


def _single(table: Table, kind: str, value: Any) -> list[str]:
    """What single numbers there are of a kind."""
    if kind not in table.kinds:
        return []
    rows = (table.kind == table.kinds.index(kind)) & ~np.isnan(value)
    return [table.names[code] for code in np.unique(table.name[rows]).tolist()]


def _curve(table: Table, kind: str, name: str, rank: int | None, value: Any) -> tuple[Any, Any]:
    rows = table.series(kind, name, rank)
    return table.step[rows], value[rows]
