"""The curves at the top of the page: metrics, or single numbers if there are no metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tensortap.record import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.table.table import Table

_MAX_NUMBERS = 2


def training_curves(
    table: Table, rank: int | None = None
) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Return name → steps and values of the metrics.

    Without metrics, these are a few of the single numbers that were caught or traced, those with
    "loss" in their name first.
    """
    with table.lock:
        metrics = table.metrics(rank)
        if metrics or not table.has("value"):
            return metrics
        value = table.column("value")
        kind_of: dict[str, str] = {}
        for kind in (Kind.LOCAL.value, Kind.VALUE.value):
            if kind in table.kinds:
                rows = (table.kind == table.kinds.index(kind)) & ~np.isnan(value)
                names = np.unique(table.name[rows]).tolist()
                kind_of |= dict.fromkeys((table.names[code] for code in names), kind)
        first = sorted(kind_of, key=lambda name: ("loss" not in name.lower(), name))
        series = {n: table.series(kind_of[n], n, rank) for n in first[:_MAX_NUMBERS]}
        return {name: (table.step[rows], value[rows]) for name, rows in series.items()}
