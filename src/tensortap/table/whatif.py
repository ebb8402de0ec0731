"""What every tensor of a run would lose in another format."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tensortap.errors import NotFound
from tensortap.record import Kind, Record
from tensortap.stats.formats import Exponents, limits, shares
from tensortap.table.logframe import histogram, layer_names, tensor_types, with_statistics
from tensortap.table.logframe_schema import need_pandas, tensor_type

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_AT_ONCE = 1 << 16  # tensors: their counts, and sums of them, are in memory together


def formats_of(
    source: Iterable[Record] | pa.Table,
    dtype: str,
    *,
    name: str | None = None,
    kind: Kind | str | None = None,
    step: int | str | None = None,
) -> pd.DataFrame:
    """A row a tensor and step: the shares that are lost in a format, and the best scale.

    The shares are of the nonzero finite values. ``underflow`` comes out as zero, ``subnormal``
    keeps fewer digits, ``overflow`` is beyond the largest number; ``…_at_most`` is larger where
    the exponents leave it open. Multiplied by ``scale = 2**shift`` at most ``scaled`` is lost.
    """
    pd = need_pandas("run.formats()")
    import numpy as np
    import pyarrow as pa

    target = limits(dtype)
    table = with_statistics(source)
    keys = pa.table(
        {
            "name": layer_names(table),
            "tensor_type": tensor_types(table),
            "step": table.column("step"),
        }
    ).to_pandas()
    chosen = np.flatnonzero(_chosen(keys, name, kind, step))
    if step is None:
        newest = keys.iloc[chosen].groupby(["name", "tensor_type"])["step"].transform("max")
        chosen = chosen[keys["step"].to_numpy()[chosen] == newest.to_numpy()]
    keys, table = keys.iloc[chosen].reset_index(drop=True), table.take(chosen)
    groups = keys.groupby(["name", "tensor_type", "step"], sort=False)
    heads = groups.size().reset_index().drop(columns=0)
    number = groups.ngroup().to_numpy()
    order = np.argsort(number, kind="stable")
    parts: list[Any] = []
    # whole groups at a time
    edges = np.searchsorted(number[order], np.arange(0, len(heads) + _AT_ONCE, _AT_ONCE))
    for first, end in itertools.pairwise(edges):
        rows = order[first:end]
        if len(rows):
            tensors = _tensors(table.take(rows), number[rows])
            parts.append(pd.DataFrame(shares(tensors, target)))
    if not parts:
        parts.append(pd.DataFrame(shares(_tensors(table, number), target)))
    found = pd.concat([heads, pd.concat(parts, ignore_index=True)], axis=1)
    found.insert(list(found.columns).index("scaled"), "scale", np.exp2(found["shift"]))
    return found


def _chosen(keys: Any, name: str | None, kind: Kind | str | None, step: int | str | None) -> Any:
    import numpy as np

    chosen = np.ones(len(keys), bool)
    if name is not None:
        chosen &= keys["name"].str.contains(name, regex=True).to_numpy(bool)
    if kind is not None:
        wanted = tensor_type(kind.value if isinstance(kind, Kind) else kind)
        if wanted is None:
            there = ", ".join(keys["tensor_type"].unique())
            raise NotFound(f"no kind is called {kind!r}; there is {there or 'nothing'}")
        types = keys["tensor_type"]
        chosen &= ((types == wanted) | types.str.startswith(f"{wanted}.")).to_numpy(bool)
    if isinstance(step, int):
        chosen &= (keys["step"] == step).to_numpy()
        if len(keys) and not chosen.any():
            first, last = keys["step"].min(), keys["step"].max()
            raise NotFound(f"nothing at step {step}; there are steps from {first} to {last}")
    elif step not in (None, "all"):
        raise NotFound(f"a step is a number or 'all', not {step!r}")
    return chosen


def _tensors(table: pa.Table, number: Any) -> Exponents:
    """The counts of rows, those of one group put together; rows of a group lie together."""
    import numpy as np

    low, counts = histogram(table)
    columns = {c: table.column(c).to_numpy() for c in ("min_abs", "max_abs")}
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    if not len(starts):
        return Exponents(low, counts[1:-1], columns["min_abs"], columns["max_abs"])
    # nan is the extreme of nothing finite: any other one counts
    return Exponents(
        low,
        np.add.reduceat(counts[1:-1], starts, axis=1),
        np.fmin.reduceat(columns["min_abs"], starts),
        np.fmax.reduceat(columns["max_abs"], starts),
    )
