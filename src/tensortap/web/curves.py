"""The curves that are always in sight: training statistics, or what comes nearest to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.record import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.viz.table import Table

_CAUGHT = 2


def curves(
    table: Table, rank: int | None = None
) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Name → steps and values: of ``tracker.step(loss=…)``, else single numbers that were caught.

    Of the latter a few, those that are called a loss first.
    """
    with table.lock:
        found = table.training(rank)
        if found or not table.has("value") or Kind.VALUE.value not in table.kinds:
            return found
        value = table.column("value")
        single = (table.kind == table.kinds.index(Kind.VALUE.value)) & ~np.isnan(value)
        names = [table.names[code] for code in np.unique(table.name[single]).tolist()]
        names.sort(key=lambda name: "loss" not in name.lower())
        return {name: _curve(table, name, rank, value) for name in names[:_CAUGHT]}


def _curve(table: Table, name: str, rank: int | None, value: Any) -> tuple[Any, Any]:
    rows = table.series(Kind.VALUE.value, name, rank)
    return table.step[rows], value[rows]
