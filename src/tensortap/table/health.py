"""Numbers of analyses as columns: each belongs to the row of a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.core.record import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.table.table import Table


def health_statistics(table: Table, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Return the numbers of analyses that belong to rows of tensors: quantity → column.

    A number belongs to the first row with the name, kind, step and rank that its tags say.
    """
    if Kind.HEALTH.value not in table.kinds:
        return {}
    import pandas as pd
    import pyarrow.compute as pc

    found = np.flatnonzero(table.kind == table.kinds.index(Kind.HEALTH.value))
    cells = table.take(found, ["tags", "number"])
    texts = {key: pc.map_lookup(cells.column("tags"), key, "first") for key in _TAGS}
    given = pd.DataFrame({
        "quantity": texts["quantity"].to_pandas(),
        "name": _codes(texts["of"].to_pandas(), table.names),
        "kind": _codes(texts["kind"].to_pandas(), table.kinds),
        "step": table.step[found], "rank": table.rank[found],
        "number": cells.column("number").to_numpy(),
    })  # fmt: skip
    places = pd.DataFrame({
        "name": table.name[rows], "kind": table.kind[rows], "step": table.step[rows],
        "rank": table.rank[rows], "row": np.arange(len(rows)),
    })  # fmt: skip
    merged = given.merge(places.drop_duplicates(_KEY), on=_KEY)
    columns: dict[str, NDArray[np.float64]] = {}
    for quantity, part in merged.groupby("quantity", sort=False):
        columns[str(quantity)] = np.full(len(rows), np.nan)
        columns[str(quantity)][part["row"].to_numpy()] = part["number"].to_numpy()
    return columns


_TAGS = ("of", "kind", "quantity")
_KEY = ["name", "kind", "step", "rank"]


def _codes(texts: Any, known: list[str]) -> Any:
    return texts.map({text: code for code, text in enumerate(known)}).fillna(-1).astype(np.int64)
