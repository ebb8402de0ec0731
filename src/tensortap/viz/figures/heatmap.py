"""Layers by steps: the whole run at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.table.sources import VALUE
from tensortap.table.table import Table, locked
from tensortap.viz.figures.theme import (
    Figure,
    Theme,
    labels,
    layout,
    message_figure,
    number,
    scale,
    template_text,
    text,
    theme_of,
    typed,
    whole_ticks,
)
from tensortap.viz.figures.tiles import beacons

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.alerts import Alert

    Reals = NDArray[np.float64]
    Whole = NDArray[np.int64]

ROWS, COLUMNS = 400, 500  # cells that a figure has at most
_MARKS = 1000
_TINY = 250  # cells of a side from which on one may be too small to see
_LEAST = ("min", "min_abs")  # of which the smallest tells most
NAN, INF = 1, 2


class Cells(NamedTuple):
    """A value for each tile of layers and steps: that of one record, the most telling."""

    layers: list[str]
    steps: Whole  # the first of each column
    tile: int  # how many layers share a row
    row: NDArray[np.int64]  # of the table; -1: nothing is there
    value: Reals
    bad: NDArray[np.uint8]  # whether the tensor holds NaN, or infinities


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
    rows: int = ROWS,
    columns: int = COLUMNS,
    theme: str = "light",
) -> Figure:
    """A statistic of all layers over all steps; `inc` is how many steps share a column.

    A tile shows the value of one record, the one farthest from zero (of minima the least), and
    one that is not finite before all others. ``layout.meta["layers"]`` are the names, and the
    `customdata` of a cell is the number of its layer there, its step, and its value.
    """
    found = cells(table, kind, metric, inc, names, rank, rows, columns)
    if found is None:
        return message_figure(f"no {metric} of {kind} here", theme=theme)
    look = theme_of(theme)
    logarithmic, z, limits = _colours(found.value, log)
    tiles = [found.layers[i : i + found.tile] for i in range(0, len(found.layers), found.tile)]
    rows_called = labels([t[0] if len(t) == 1 else f"{t[0]} … {t[-1]}" for t in tiles])
    signed = not logarithmic and limits[0] < 0 < limits[1]
    layer_of = {name: i for i, name in enumerate(found.layers)}
    custom = _custom(table, found, layer_of)
    base: dict[str, Any] = {
        "type": "heatmap",
        "name": text(metric),
        "x": typed(found.steps),
        "y": rows_called,
        "z": typed(z.astype(np.float32)),
        "customdata": typed(custom),
        "colorscale": scale(look.sign if signed else look.size),
        "zmin": limits[0],
        "zmax": limits[1],
        "hoverongaps": False,
        "hovertemplate": "%{y}<br>step %{customdata[1]}<br>"
        f"{template_text(metric)} %{{customdata[2]:.5~g}}<extra></extra>",
        "colorbar": _bar(metric, limits, logarithmic),
    }
    if found.tile > 1:
        base["hovertemplate"] = f"one of {found.tile}: " + base["hovertemplate"]
    data = [base]
    for code, colour, word in ((NAN, look.nan, "NaN"), (INF, look.inf, "Inf")):
        if (found.bad == code).any():
            data += _flags(found, code, colour, word, base, look)
    marked = _alerts(table, alerts, kind, found, rank)
    if marked:
        data.append(_triangles(marked, rows_called, found, look))
    height = min(max(260, 92 + 22 * len(rows_called)), 720)
    # as far as the cells go: around the marks on them plotly would leave a margin
    ticks = {"type": "category", "showgrid": False, "ticklen": 0}
    ticks["range"] = [len(rows_called) - 0.5, -0.5]
    ticks["tickfont"] = {"size": 11 if len(rows_called) <= 40 else 9, "color": look.dim}
    made = layout(
        theme,
        height=height,
        margin={"l": 40, "r": 16, "t": 40, "b": 48},
        xaxis={
            "title": {"text": "step"},
            "showgrid": False,
            "zeroline": False,
            "range": _span(found.steps),
            **whole_ticks(float(found.steps[-1] - found.steps[0])),
        },
        yaxis={**ticks, "zeroline": False},
        hovermode="closest",
        legend={"x": 1, "xanchor": "right"},
        showlegend=len(data) > 1,
        meta={"layers": found.layers, "kind": kind, "metric": metric, "tile": found.tile},
        shapes=[],
    )
    if step is not None:
        from tensortap.viz.figures.panels import step_line

        made["shapes"] = [step_line(step, "x", look)]
    return {"data": data, "layout": made}


def _span(steps: Whole) -> list[float]:
    """From where the first column begins to where the last one ends."""
    if len(steps) < 2:
        return [float(steps[0]) - 0.5, float(steps[0]) + 0.5]
    before, after = (float(steps[1] - steps[0]) / 2, float(steps[-1] - steps[-2]) / 2)
    return [float(steps[0]) - before, float(steps[-1]) + after]


def cells(
    table: Table,
    kind: str,
    metric: str,
    inc: int,
    names: Sequence[str] | None,
    rank: int | None,
    most_rows: int,
    most_columns: int,
) -> Cells | None:
    """The records of a kind, gathered in tiles of layers and steps; None if there are none."""
    if inc < 1:
        raise ValueError(f"inc={inc}: how many steps share a column, at least 1")
    layers = table.layers(kind) if names is None else list(names)
    of_layer = [table.series(kind, name, rank) for name in layers]
    rows = np.concatenate([np.empty(0, np.int64), *of_layer])
    value = table.column(metric)[rows]
    known = ~np.isnan(value) | table.is_known(metric, rows)
    lengths = [len(each) for each in of_layer]
    layer = np.repeat(np.arange(len(layers)), lengths)
    rows, value, layer = rows[known], value[known], layer[known]
    if not len(rows):
        return None
    # a layer of which nothing is known has no row
    there = np.unique(layer)
    layers = [layers[i] for i in there.tolist()]
    layer = np.searchsorted(there, layer)
    step = table.step[rows]
    steps = np.unique(step // inc)
    wide = max(1, math.ceil(len(steps) / most_columns))
    column = np.searchsorted(steps, step // inc) // wide
    firsts = steps[::wide] * inc if inc > 1 else steps[::wide]
    tile = max(1, math.ceil(len(layers) / most_rows))
    shape = math.ceil(len(layers) / tile), len(firsts)
    place = (layer // tile) * shape[1] + column
    bad = _badness(table, rows)
    if metric == VALUE:  # a single number that is not finite
        bad[np.isinf(value)] = INF
        bad[np.isnan(value)] = NAN
    order = np.argsort(_telling(value, bad, metric), kind="stable")
    best = np.full(shape[0] * shape[1], -1, np.int64)
    best[place[order]] = order  # of several the last one stays, which tells most
    chosen = best.reshape(shape)
    held = chosen >= 0
    return Cells(
        layers,
        firsts,
        tile,
        np.where(held, rows[chosen], -1),
        np.where(held, value[chosen], np.nan),
        np.where(held, bad[chosen], 0).astype(np.uint8),
    )


def _badness(table: Table, rows: Whole) -> NDArray[np.uint8]:
    bad = np.zeros(len(rows), np.uint8)
    if table.has("nans"):
        bad[table.nonfinite(rows) > 0] = INF
        bad[np.nan_to_num(table.column("nans")[rows]) > 0] = NAN
    return bad


def _telling(value: Reals, bad: NDArray[np.uint8], metric: str) -> Reals:
    if metric in _LEAST:
        telling = -value
    else:
        telling = value if metric == "max" else np.abs(value)
    telling = np.nan_to_num(telling, nan=-np.inf, posinf=1e308, neginf=-1e308)
    return np.where(bad == NAN, np.inf, np.where(bad == INF, 1.1e308, telling))


def _colours(value: Reals, log: bool | None) -> tuple[bool, Reals, tuple[float, float]]:
    """Whether colours are by decades, the numbers that are coloured, and their range."""
    good = value[np.isfinite(value)]
    above = good[good > 0]
    if log is None:
        log = bool(len(above)) and not (good < 0).any() and above.max() > 30 * above.min()
    if log and len(above):
        with np.errstate(divide="ignore", invalid="ignore"):
            z = np.log10(value)
        # a few that are next to nothing do not take the colours from all others
        low, high = (float(np.log10(np.quantile(above, part))) for part in (0.01, 1.0))
        low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
        z = np.where(value <= 0, low, z)
        return True, np.where(np.isinf(value), high, z), (low, high)
    if not len(good):
        return False, value, (0.0, 1.0)
    low, high = (float(q) for q in np.quantile(good, (0.002, 0.998)))
    if low < 0 < high:
        far = max(-low, high)
        low, high = -far, far
    if high <= low:
        low, high = low - 0.5, high + 0.5
    return False, value, (low, high)


def _custom(table: Table, found: Cells, layer_of: dict[str, int]) -> NDArray[Any]:
    """Of each cell the layer's number, the step and the value of the record that it shows."""
    held = found.row >= 0
    row = np.maximum(found.row, 0)
    places = np.array([layer_of.get(name, -1) for name in table.names], np.int64)
    layer, step = places[table.name[row]], table.step[row]
    exact = np.float32 if step.max(initial=0) < 1 << 24 else np.float64
    custom = np.stack([layer, step, found.value], axis=-1).astype(exact)
    custom[~held] = np.nan
    return custom


def _bar(metric: str, limits: tuple[float, float], logarithmic: bool) -> dict[str, Any]:
    bar: dict[str, Any] = {"title": {"text": text(metric), "side": "top"}, "len": 1, "y": 0.5}
    if not logarithmic:
        return {**bar, "exponentformat": "power", "nticks": 6}
    low, high = limits
    by = max(1, math.ceil((high - low) / 6))
    whole = list(range(math.ceil(low), math.floor(high) + 1, by))
    if len(whole) >= 2:
        called = [f"10<sup>{str(n).replace('-', '−')}</sup>" if n else "1" for n in whole]
        return {**bar, "tickvals": whole, "ticktext": called}
    few = np.linspace(low, high, 4)
    return {**bar, "tickvals": few.tolist(), "ticktext": [number(10.0**v, 2) for v in few]}


def _flags(
    found: Cells, code: int, colour: str, word: str, base: dict[str, Any], look: Theme
) -> list[dict[str, Any]]:
    """Cells that are not finite, in a colour that the scale has not."""
    mine = found.bad == code
    flat = {
        **{key: base[key] for key in ("type", "x", "y", "customdata", "hoverongaps")},
        "name": word,
        "showlegend": False,
        "z": typed(np.where(mine, 1.0, np.nan).astype(np.float32)),
        "colorscale": [[0, colour], [1, colour]],
        "showscale": False,
        "zmin": 0,
        "zmax": 1,
        "hovertemplate": f"%{{y}}<br>step %{{customdata[1]}}<br><b>holds {word}</b><extra></extra>",
    }
    down, across = beacons(mine)
    tiny = mine.shape[0] > _TINY // 2 or mine.shape[1] > _TINY
    key = {
        "type": "scatter",
        "mode": "markers",
        "x": typed(found.steps[across]) if tiny else [None],
        "y": [base["y"][i] for i in down.tolist()] if tiny else [base["y"][0]],
        "name": f"holds {word}",
        "marker": {
            "symbol": "square",
            "size": 6,
            "color": colour,
            "line": {"width": 1, "color": look.page},
        },
        "hoverinfo": "skip",
    }
    return [flat, key]


def _alerts(
    table: Table, alerts: Sequence[Alert] | None, kind: str, found: Cells, rank: int | None
) -> list[Alert]:
    given = table.alerts() if alerts is None else alerts
    layers = set(found.layers)
    return [
        alert
        for alert in given
        if alert.kind.value == kind
        and alert.name in layers
        and (rank is None or alert.rank == rank)
    ]


def _triangles(
    alerts: Sequence[Alert], called: list[str], found: Cells, look: Theme
) -> dict[str, Any]:
    layer_of = {name: i for i, name in enumerate(found.layers)}
    gathered: dict[tuple[int, int], list[Alert]] = {}
    for alert in alerts:
        place = layer_of[alert.name] // found.tile
        column = int(np.searchsorted(found.steps, alert.step, side="right")) - 1
        gathered.setdefault((place, max(0, column)), []).append(alert)
    shown = list(gathered.items())[:_MARKS]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "alert",
        "x": [int(found.steps[column]) for (_, column), _ in shown],
        "y": [called[place] for (place, _), _ in shown],
        "customdata": [[layer_of[group[0].name], group[0].step, None] for _, group in shown],
        "text": [
            "<br>".join(text(str(alert), 120) for alert in group[:4])
            + (f"<br>… and {len(group) - 4} more" if len(group) > 4 else "")
            for _, group in shown
        ],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "symbol": "triangle-up",
            "size": 10,
            "color": look.alert,
            "line": {"width": 1, "color": look.page},
        },
    }
