"""A statistic of all layers over all steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.page.encoding import typed
from tensortap.rooms.figures.figures.parts import (
    FLAT_AXIS,
    flagged_cells,
    marks_trace,
    spans_decades,
    step_line,
    whole_ticks,
)
from tensortap.rooms.figures.figures.theme import (
    AUTO,
    COLORS,
    Figure,
    Floats,
    Integers,
    labels,
    layout,
    message_figure,
    scale,
    statistic_text,
    template_text,
    text,
)
from tensortap.table.columns import VALUE
from tensortap.table.table import Table, locked
from tensortap.text.tensors import number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.alerts import Alert


ROWS, COLUMNS = 400, 500  # largest number of cells
_MAX_ALERTS = 1000
NAN, INF = 1, 2


class HeatmapCells(NamedTuple):
    """One record per cell: of the layers and steps that share a cell, the one that matters most."""

    layers: list[str]
    steps: Integers  # the first recorded step of each column
    tile: int  # how many layers share a row
    layer: Integers  # index into `layers` of each cell; -1 where there is no record
    step: Integers
    value: Floats
    bad: NDArray[np.uint8]  # NAN or INF, if the tensor has such values


@locked
def heatmap_figure(
    table: Table,
    *,
    kind: str,
    metric: str,
    inc: int = 1,
    names: Sequence[str] | None = None,
    rank: int | None = None,
    alerts: Sequence[Alert] | None = None,
    step: int | None = None,
    log: bool | None = None,
    relative: bool = False,
) -> Figure:
    """Return a heatmap of a statistic: layers by steps, `inc` steps per column.

    If `relative`, colors show how far a magnitude is from the median of its row: layers of any
    scale are then comparable, and a change stands out.

    A cell shows one record: one that is not finite before all others, then that of the column's
    label, its first step. If several have it, or more than 500 columns share cells, it is the one
    farthest from zero (the smallest, for minima). ``layout.meta["layers"]`` are the names, and the
    `customdata` of a cell is the index of its layer there, its step, and its value.
    """
    cells = heatmap_cells(table, kind, metric, inc, names, rank)
    if cells is None:
        return message_figure(f"no {statistic_text(metric)} of {kind}")
    tiles = [cells.layers[i : i + cells.tile] for i in range(0, len(cells.layers), cells.tile)]
    row_labels = labels([t[0] if len(t) == 1 else f"{t[0]} … {t[-1]}" for t in tiles])
    custom = {"customdata": typed(_custom(cells)), "hoverongaps": False}
    data = [_cells_trace(cells, metric, log, relative, row_labels, custom)]
    for code, color, word in ((NAN, COLORS.nan, "NaN"), (INF, COLORS.inf, "Inf")):
        if (cells.bad == code).any():
            hover = f"%{{y}}<br>step %{{customdata[1]}}<br><b>holds {word}</b><extra></extra>"
            data += flagged_cells(
                cells.bad == code, cells.steps, row_labels, color, f"holds {word}",
                name=word, showlegend=False, hovertemplate=hover, **custom,
            )  # fmt: skip
    alerts = table.alerts() if alerts is None else alerts
    layers = set(cells.layers)
    shown = [
        a for a in alerts if a.kind.value == kind and a.name in layers and rank in (None, a.rank)
    ]
    if shown:
        data.append(_alerts_trace(shown, row_labels, cells))
    font = {"size": 11 if len(row_labels) <= 40 else 9, "color": COLORS.dim}
    made = layout(
        height=min(max(260, 92 + 22 * len(row_labels)), 720),
        # explicit ranges, because plotly would leave a margin around the marks
        xaxis={
            **FLAT_AXIS, "title": {"text": "step"}, "range": column_range(cells.steps),
            **whole_ticks(float(cells.steps[-1] - cells.steps[0])),
        },
        yaxis={
            **FLAT_AXIS, "type": "category", "ticklen": 0, "tickfont": font,
            "range": [len(row_labels) - 0.5, -0.5],
        },
        legend={"x": 0},  # buttons are on the right
        showlegend=len(data) > 1,
        meta={"layers": cells.layers, "kind": kind, "metric": metric, "tile": cells.tile},
        shapes=[] if step is None else [step_line(step)],
    )  # fmt: skip
    return {"data": data, "layout": made}


def heatmap_cells(
    table: Table, kind: str, metric: str, inc: int, names: Sequence[str] | None, rank: int | None
) -> HeatmapCells | None:
    """Gather the records of a kind in cells of layers and steps; return None if there are none."""
    layers = table.layers(kind) if names is None else list(names)
    series = [table.series(kind, name, rank) for name in layers]
    rows = np.concatenate([np.empty(0, np.int64), *series])
    layer = np.repeat(np.arange(len(layers)), [len(each) for each in series])
    known = table.is_known("rm2" if metric == AUTO else metric, rows)
    if metric == AUTO:
        known |= table.has_number(rows)
    rows, layer = rows[known], layer[known]
    if not len(rows):
        return None
    present, layer = np.unique(layer, return_inverse=True)
    layers = [layers[i] for i in present.tolist()]
    step, value = table.step[rows], statistic_column(table, metric, rows)
    columns, column = np.unique(step // inc, return_inverse=True)
    first = columns * inc + inc
    np.minimum.at(first, column, step)
    wide = math.ceil(len(columns) / COLUMNS)
    tile = math.ceil(len(layers) / ROWS)
    shape = math.ceil(len(layers) / tile), math.ceil(len(columns) / wide)
    cell = (layer // tile) * shape[1] + column // wide
    bad = _badness(table, rows, value if metric in (AUTO, VALUE) else None)
    order = np.lexsort((_importance(value, bad, metric), (step == first[column]) | (bad > 0)))
    best = np.full(shape[0] * shape[1], -1, np.int64)
    best[cell[order]] = order  # the last assignment wins: the most important record
    best = best.reshape(shape)
    filled = best >= 0
    return HeatmapCells(
        layers,
        first[::wide],
        tile,
        np.where(filled, layer[best], -1),
        step[best],
        np.where(filled, value[best], np.nan),
        np.where(filled, bad[best], 0).astype(np.uint8),
    )


def statistic_column(table: Table, metric: str, rows: Integers) -> Floats:
    """Return a statistic of some rows; "auto" is the value of numbers, and the RMS of tensors."""
    if metric != AUTO:
        return table.column(metric)[rows]
    return np.where(table.has_number(rows), table.column(VALUE)[rows], table.column("rm2")[rows])


def _badness(table: Table, rows: Integers, value: Floats | None) -> NDArray[np.uint8]:
    bad = np.zeros(len(rows), np.uint8)
    if table.has("nans"):
        bad[table.nonfinite(rows) > 0] = INF
        bad[np.nan_to_num(table.column("nans")[rows]) > 0] = NAN
    if value is not None:  # single numbers, which have no counts
        bad[np.isinf(value)] = INF
        bad[np.isnan(value)] = NAN
    return bad


def _importance(value: Floats, bad: NDArray[np.uint8], metric: str) -> Floats:
    size = np.abs(value)
    if metric in ("min", "min_abs"):  # the smallest value matters
        size = -value
    elif metric == "max":
        size = value
    size = np.nan_to_num(size, nan=-np.inf, posinf=1e308, neginf=-1e308)
    return np.where(bad == NAN, np.inf, np.where(bad == INF, 1.1e308, size))


def _custom(cells: HeatmapCells) -> NDArray[Any]:
    exact = np.float32 if cells.step.max(initial=0) < 1 << 24 else np.float64
    custom = np.stack([cells.layer, cells.step, cells.value], axis=-1).astype(exact)
    custom[cells.layer < 0] = np.nan
    return custom


def _cells_trace(
    cells: HeatmapCells,
    metric: str,
    log: bool | None,
    relative: bool,
    row_labels: list[str],
    custom: dict[str, Any],
) -> dict[str, Any]:
    if relative:
        z, limits = _relative(cells.value)
        signed, bar = True, _relative_bar(limits)
    else:
        logarithmic, z, limits = color_range(cells.value, log)
        signed = not logarithmic and limits[0] < 0 < limits[1]
        bar = color_bar(statistic_text(metric), limits, logarithmic)
    shared = f"one of {cells.tile}: " if cells.tile > 1 else ""
    return {
        "type": "heatmap", "name": text(metric), "x": typed(cells.steps), "y": row_labels,
        "z": typed(z.astype(np.float32)), "zmin": limits[0], "zmax": limits[1],
        "colorscale": scale(COLORS.sign if signed else COLORS.size),
        "hovertemplate": f"{shared}%{{y}}<br>step %{{customdata[1]}}<br>"
        f"{template_text(statistic_text(metric))} "
        "%{customdata[2]:.5~g}<extra></extra>",
        "colorbar": bar, **custom,
    }  # fmt: skip


def _relative(value: Floats) -> tuple[Floats, tuple[float, float]]:
    """Return log10 of each magnitude ÷ the median of its row, and the range of colors."""
    size = np.where(np.isfinite(value) & (value != 0), np.abs(value), np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows without any number
        z = np.log10(size / np.nanmedian(size, axis=1, keepdims=True))
    far = np.abs(z[~np.isnan(z)])
    # a few extreme cells must not take the colors from all others
    high = max(math.log10(2), float(np.quantile(far, 0.98))) if len(far) else 1.0
    zeros = np.where((value == 0) & ~np.isnan(z).all(axis=1, keepdims=True), -high, 0.0)
    return np.where(np.isnan(z) & np.isfinite(value), zeros, z), (-high, high)


def _relative_bar(limits: tuple[float, float]) -> dict[str, Any]:
    most = 10.0 ** limits[1]
    factors = [n for n in (1.2, 1.5, 2, 3, 5, 10, 30, 100, 1e3, 1e4, 1e6) if n < 0.93 * most][-2:]
    ticks = [1 / n for n in reversed(factors)] + [1.0, *factors]
    return {
        "title": {"text": "× median<br>of the row", "side": "top"}, "len": 1, "y": 0.5,
        "tickvals": [math.log10(n) for n in ticks],
        "ticktext": [f"× {number(n, 2)}" if n >= 1 else f"÷ {number(1 / n, 2)}" for n in ticks],
    }  # fmt: skip


def color_range(value: Floats, log: bool | None) -> tuple[bool, Floats, tuple[float, float]]:
    """Return whether colors are logarithmic, the numbers to color, and their range."""
    good = value[np.isfinite(value)]
    above = good[good > 0]
    log = spans_decades(good) if log is None else log and len(above) > 0
    if log:
        # a few tiny values must not take the colors from all others
        low, high = (float(np.log10(np.quantile(above, part))) for part in (0.01, 1.0))
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.where(value <= 0, low, np.log10(value))
        value = np.where(np.isinf(value), high, value)
    elif len(good):
        low, high = (float(q) for q in np.quantile(good, (0.002, 0.998)))
        if low < 0 < high:
            low, high = -max(-low, high), max(-low, high)
    else:
        low, high = 0.0, 1.0
    return log, value, (low, high) if high > low else (low - 0.5, high + 0.5)


def color_bar(metric: str, limits: tuple[float, float], logarithmic: bool) -> dict[str, Any]:
    bar: dict[str, Any] = {"title": {"text": text(metric), "side": "top"}, "len": 1, "y": 0.5}
    if not logarithmic:
        return {**bar, "exponentformat": "power", "nticks": 6}
    low, high = limits
    by = max(1, math.ceil((high - low) / 6))
    decades = list(range(math.ceil(low), math.floor(high) + 1, by))
    if len(decades) >= 2:
        powers = [f"10<sup>{str(n).replace('-', '−')}</sup>" if n else "1" for n in decades]
        return {**bar, "tickvals": decades, "ticktext": powers}
    few = np.linspace(low, high, 4).tolist()
    return {**bar, "tickvals": few, "ticktext": [number(10.0**v, 2) for v in few]}


def column_range(steps: Integers) -> list[float]:
    """Return where the first column begins and the last one ends."""
    widths = np.diff(steps) if len(steps) > 1 else np.ones(1)
    return [float(steps[0] - widths[0] / 2), float(steps[-1] + widths[-1] / 2)]


def _alerts_trace(
    alerts: Sequence[Alert], row_labels: list[str], cells: HeatmapCells
) -> dict[str, Any]:
    index = {name: i for i, name in enumerate(cells.layers)}
    groups: dict[tuple[int, int], list[Alert]] = {}
    for alert in alerts:
        column = int(np.searchsorted(cells.steps, alert.step, side="right")) - 1
        groups.setdefault((index[alert.name] // cells.tile, max(0, column)), []).append(alert)
    shown = list(groups.items())[:_MAX_ALERTS]
    return marks_trace(
        [int(cells.steps[column]) for (_, column), _ in shown],
        [row_labels[row] for (row, _), _ in shown],
        COLORS.alert, symbol="triangle-up", size=10, edge=COLORS.page, name="alert",
        customdata=[[index[group[0].name], group[0].step, None] for _, group in shown],
        text=[
            "<br>".join(text(str(alert), 120) for alert in group[:4])
            + (f"<br>… and {len(group) - 4} more" if len(group) > 4 else "")
            for _, group in shown
        ],
        hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
