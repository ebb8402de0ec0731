"""Losses of the tensors of a run in a number format, as a frame for `run.formats`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.core.errors import NotFound
from tensortap.core.patterns import compile_pattern
from tensortap.core.record import Kind
from tensortap.rooms.formats.blocks import BLOCK_FORMATS
from tensortap.rooms.formats.losses import limits, shares
from tensortap.rooms.logframe.labels import layer_names, rows_with_statistics, tensor_types
from tensortap.table.columns import Exponents, exponents
from tensortap.table.kinds import need_pandas, tensor_type

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from tensortap.table.table import Table

    Integers = NDArray[np.int64]

_AT_ONCE = 1 << 16  # tensors whose exponent counts are in memory together


def formats_of(
    table: Table,
    dtype: str,
    *,
    name: str | None = None,
    kind: Kind | str | None = None,
    step: int | str | None = None,
) -> pd.DataFrame:
    """Return one row per tensor and step: the shares lost of nonzero values, and the best scale."""
    need_pandas("run.formats()")
    import pandas as pd

    if dtype in BLOCK_FORMATS:
        raise NotFound(f"{dtype} needs values: tap.viz.quantize_error(run.get(name), {dtype!r})")
    target = limits(dtype)
    keys, rows = _chosen_rows(table, name, kind, step)
    groups = keys.groupby(["name", "tensor_type", "step"], sort=False)
    tensors = groups.size().reset_index().drop(columns=0)
    group = groups.ngroup().to_numpy()
    order = np.argsort(group, kind="stable")
    starts = range(0, len(tensors), _AT_ONCE)
    parts = []
    for part in np.split(order, np.searchsorted(group[order], starts)[1:]):  # whole groups
        lost = shares(_grouped_exponents(table, rows[part], group[part]), target)
        parts.append(pd.DataFrame(lost))
    frame = pd.concat([tensors, pd.concat(parts, ignore_index=True)], axis=1)
    frame.insert(list(frame.columns).index("scaled"), "scale", np.exp2(frame["shift"]))
    return frame


def _chosen_rows(
    table: Table, name: str | None, kind: Kind | str | None, step: int | str | None
) -> tuple[pd.DataFrame, Integers]:
    """Return name, tensor_type and step of the rows with statistics that match, and the rows.

    Without `step` these are the rows of the latest step of each tensor.
    """
    import pyarrow as pa

    rows, cells = rows_with_statistics(table, ["tags"])
    columns = {
        "name": layer_names(table, rows, cells),
        "tensor_type": tensor_types(table, rows, cells),
        "step": table.step[rows],
    }
    keys = pa.table(columns).to_pandas()
    chosen = np.flatnonzero(_matches(keys, name, kind, step))
    if step is None:
        newest = keys.iloc[chosen].groupby(["name", "tensor_type"])["step"].transform("max")
        chosen = chosen[keys["step"].to_numpy()[chosen] == newest.to_numpy()]
    return keys.iloc[chosen].reset_index(drop=True), rows[chosen]


def _matches(keys: Any, name: str | None, kind: Kind | str | None, step: int | str | None) -> Any:
    chosen = np.ones(len(keys), bool)
    if name is not None:
        names, pattern = keys["name"], compile_pattern(name)
        chosen &= names.isin([n for n in names.unique() if pattern.search(n)]).to_numpy(bool)
    if kind is not None:
        wanted = tensor_type(kind.value if isinstance(kind, Kind) else kind)
        types = keys["tensor_type"]
        if wanted is None:
            available = ", ".join(types.unique())
            raise NotFound(f"no kind is called {kind!r}; available: {available or 'none'}")
        chosen &= ((types == wanted) | types.str.startswith(f"{wanted}.")).to_numpy(bool)
    if isinstance(step, int):
        chosen &= (keys["step"] == step).to_numpy()
        if len(keys) and not chosen.any():
            first, last = keys["step"].min(), keys["step"].max()
            raise NotFound(f"nothing at step {step}; steps go from {first} to {last}")
    elif step not in (None, "all"):
        raise NotFound(f"step must be a number or 'all', got {step!r}")
    return chosen


def _grouped_exponents(table: Table, rows: Integers, group: Integers) -> Exponents:
    """Return the exponents of groups of rows; the rows of a group are adjacent."""
    low, counts, smallest, largest = exponents(table, rows)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    if not len(starts):
        return Exponents(low, counts, smallest, largest)
    # NaN is the extreme of no finite values: any other one counts
    return Exponents(
        low,
        np.add.reduceat(counts, starts, axis=1),
        np.fmin.reduceat(smallest, starts),
        np.fmax.reduceat(largest, starts),
    )
