"""Norms of a sharded model, of which each rank knows its part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from tensortap.table.table import Table


def with_whole_norms(table: Table, metrics: pd.DataFrame) -> pd.DataFrame:
    """Return metrics in which norms of a sharded model are those of all ranks together."""
    import pyarrow.compute as pc

    tags = table.take(metrics["row"].to_numpy(), ["tags"]).column("tags")
    parts = pc.not_equal(pc.fill_null(pc.map_lookup(tags, "placements", "first"), ""), "")
    norms = metrics["name"].str.contains(r"(?:^|\.)model\.\w+_norm", regex=True)
    chosen = parts.to_numpy(zero_copy_only=False) & norms
    squares = (metrics["number"] ** 2)[chosen].groupby([metrics["step"], metrics["name"]])
    complete = squares.transform("size") == len(table.ranks())
    whole = np.sqrt(squares.transform("sum")).where(complete)
    return metrics.assign(number=metrics["number"].where(~chosen, whole))
