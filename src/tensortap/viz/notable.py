"""Which layers are worth a look, when there is room for a few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.errors import NotFound
from tensortap.stats.formats import limits, shares
from tensortap.table.table import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.alerts import Alert

_LOOKED_AT = 3000  # layers whose exponents are gone through
FORMATS = ("float8_e4m3fn", "float8_e5m2", "float16")


def notable(table: Table, kind: str, alerts: Sequence[Alert], most: int = 6) -> list[str]:
    """Layers with alerts, then those that were not finite, then those that changed most."""
    layers = table.layers(kind)
    first: dict[str, int] = {}
    for number, alert in enumerate(alerts):
        if alert.kind.value == kind:
            first.setdefault(alert.name, number)
    size = table.column("rm2") if table.has("rm2") else None
    ranked = []
    for place, name in enumerate(layers):
        rows = table.series(kind, name)
        bad = bool(table.nonfinite(rows).any())
        change = 0.0 if size is None else _change(size[rows])
        ranked.append((first.get(name, len(alerts)), not bad, -change, place, name))
    chosen = sorted(ranked)[:most]
    return [each[-1] for each in sorted(chosen, key=lambda each: each[3])]


def _change(values: NDArray[np.float64]) -> float:
    """By how many powers of ten something has changed."""
    good = values[np.isfinite(values) & (values > 0)]
    return float(np.log10(good.max() / good.min())) if len(good) else 0.0


def telling_step(table: Table, kind: str, names: Sequence[str], before: int | None) -> int | None:
    """The last step at which all of these were finite, and not after `before` if that can be."""
    steps: NDArray[np.int64] | None = None
    for name in names:
        rows = table.series(kind, name)
        good = rows[table.nonfinite(rows) == 0]
        mine = np.unique(table.step[good])
        steps = mine if steps is None else np.intersect1d(steps, mine)
    if steps is None or not len(steps):
        return None
    if before is not None and (steps <= before).any():
        steps = steps[steps <= before]
    return int(steps[-1])


class Lost(NamedTuple):
    """What a tensor would lose in some formats, at one step."""

    kind: str
    name: str
    step: int
    columns: dict[str, dict[str, float]]  # format → what `stats.formats.shares` says of it


def losses_table(table: Table, most: int = 12) -> list[Lost]:
    """The tensors that lose most in the first of the formats, at their last step that is finite."""
    heads, rows = [], []
    for kind in table.tensor_kinds():
        for name in table.layers(kind)[:_LOOKED_AT]:
            mine = table.series(kind, name)
            mine = mine[table.nonfinite(mine) == 0]
            if len(mine):
                heads.append((kind, name, int(table.step[mine[-1]])))
                rows.append(mine[-1])
    if not rows:
        return []
    try:
        found = table.exponents(np.array(rows, np.int64))
        columns = {dtype: shares(found, limits(dtype)) for dtype in FORMATS}
    except NotFound:
        return []
    lost = _lost(columns[FORMATS[0]])
    order = [i for i in np.argsort(-lost, kind="stable").tolist() if lost[i] > 0][:most]
    return [
        Lost(heads[i][0], heads[i][1], heads[i][2], {d: _at(columns[d], i) for d in FORMATS})
        for i in order
    ]


def _at(columns: dict[str, Any], place: int) -> dict[str, float]:
    return {name: float(column[place]) for name, column in columns.items()}


def _lost(columns: dict[str, Any]) -> NDArray[np.float64]:
    total = columns["underflow_at_most"] + columns["overflow_at_most"]
    return np.nan_to_num(np.asarray(total, np.float64))
