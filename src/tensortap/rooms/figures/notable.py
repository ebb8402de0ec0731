"""Choose the layers and tensors that deserve a place in a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tensortap.core.errors import NotFound
from tensortap.stats.formats import limits, shares
from tensortap.table.table import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.alerts import Alert

FORMATS = ("float8_e4m3fn", "float8_e5m2", "float16")
_MAX_LAYERS = 3000  # layers of each kind whose exponents are read


def notable_layers(table: Table, kind: str, alerts: Sequence[Alert], most: int) -> list[str]:
    """Return the layers with alerts, then those with NaN or Inf, then those that changed most."""
    first_alert: dict[str, int] = {}
    for number, alert in enumerate(alerts):
        if alert.kind.value == kind:
            first_alert.setdefault(alert.name, number)
    sizes = table.column("rm2") if table.has("rm2") else np.full(len(table), np.nan)
    ranked = []
    for position, name in enumerate(table.layers(kind)):
        rows = table.series(kind, name)
        finite = not table.nonfinite(rows).any()
        key = first_alert.get(name, len(alerts)), finite, -_decades(sizes[rows])
        ranked.append((key, position, name))
    chosen = sorted(ranked)[:most]
    return [name for _, _, name in sorted(chosen, key=lambda layer: layer[1])]


def _decades(values: NDArray[np.float64]) -> float:
    """Return how many powers of ten lie between the smallest and the largest value."""
    good = values[np.isfinite(values) & (values > 0)]
    return float(np.log10(good.max() / good.min())) if len(good) else 0.0


def last_finite_step(
    table: Table, kind: str, names: Sequence[str], before: int | None
) -> int | None:
    """Return the last step at which all of these layers are finite, if possible up to `before`."""
    steps: NDArray[np.int64] | None = None
    for name in names:
        finite = np.unique(table.step[_finite_rows(table, kind, name)])
        steps = finite if steps is None else np.intersect1d(steps, finite)
    if steps is None or not len(steps):
        return None
    if before is not None and (steps <= before).any():
        steps = steps[steps <= before]
    return int(steps[-1])


def _finite_rows(table: Table, kind: str, name: str) -> NDArray[np.int64]:
    rows = table.series(kind, name)
    finite: NDArray[np.int64] = rows[table.nonfinite(rows) == 0]
    return finite


class PrecisionLoss(NamedTuple):
    """The shares of a tensor that some formats would lose at one step."""

    kind: str
    name: str
    step: int
    losses: dict[str, dict[str, float]]
    """Format → the figures of `stats.formats.shares`."""


def largest_losses(table: Table, most: int = 12) -> list[PrecisionLoss]:
    """Return the tensors that lose most in the first format, each at its last finite step."""
    tensors, rows = [], []
    for kind in table.tensor_kinds():
        for name in table.layers(kind)[:_MAX_LAYERS]:
            finite = _finite_rows(table, kind, name)
            if len(finite):
                tensors.append((kind, name, int(table.step[finite[-1]])))
                rows.append(finite[-1])
    if not rows:
        return []
    try:
        exponents = table.exponents(np.array(rows, np.int64))
    except NotFound:
        return []
    columns = {dtype: shares(exponents, limits(dtype)) for dtype in FORMATS}
    first = columns[FORMATS[0]]
    lost = np.nan_to_num(np.asarray(first["underflow_at_most"] + first["overflow_at_most"]))
    order = [i for i in np.argsort(-lost, kind="stable").tolist() if lost[i] > 0][:most]
    return [
        PrecisionLoss(
            kind, name, step,
            {d: {key: float(each[i]) for key, each in columns[d].items()} for d in FORMATS},
        )
        for i in order
        for kind, name, step in [tensors[i]]
    ]  # fmt: skip
