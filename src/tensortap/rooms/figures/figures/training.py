"""Training statistics: the curves from which people choose a step, and sparklines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Kind
from tensortap.page.encoding import typed
from tensortap.rooms.figures.figures.parts import (
    axis_id,
    axis_name,
    decimate,
    line_trace,
    log_axis,
    marks_trace,
    spans_decades,
    step_line,
)
from tensortap.rooms.figures.figures.theme import (
    COLORS,
    Figure,
    Floats,
    layout,
    message_figure,
    text,
)
from tensortap.table.table import Table

Curves = Mapping[str, tuple[NDArray[np.int64], Floats]]

_MAX_CURVES = 4
_MAX_CLICKABLE = 5000  # steps that a click can choose
_MAX_MARKS = 1000


def training_figure(
    source: Table | Curves,
    *,
    names: Sequence[str] | None = None,
    rank: int | None = None,
    step: int | None = None,
    height: int = 150,
) -> Figure:
    """Return the training statistics over steps, each on its own scale; `step` is marked.

    The first curve has the left axis, the second the right one.
    """
    curves, ranks = source, 1
    if isinstance(source, Table):
        curves, ranks = training_curves(source, rank), len(source.ranks()) if rank is None else 1
    assert isinstance(curves, Mapping)
    chosen = [name for name in (curves if names is None else names) if name in curves]
    shown = {name: curves[name] for name in chosen[:_MAX_CURVES]}
    if not shown:
        words = "no training statistics: record them with tracker.step(loss=loss)"
        return message_figure(words, height)
    made = layout(
        height=height,
        margin={"l": 56, "r": 56 if len(shown) > 1 else 16, "t": 24, "b": 32},
        hovermode="x unified",
        hoverdistance=-1,  # a click anywhere is a click on the nearest step
        xaxis={"showspikes": True, "spikemode": "across", "spikesnap": "cursor", "title": None},
        legend={"y": 1, "font": {"size": 11, "color": COLORS.ink}},
        showlegend=True,
        shapes=[] if step is None else [step_line(step)],
        meta={"names": list(shown)},
        yaxis9={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    )
    mean_of = f" (mean of {ranks} ranks)" if ranks > 1 else ""
    data: list[dict[str, Any]] = []
    for number, (name, (steps, values)) in enumerate(shown.items()):
        data += _curve(steps, values, number, name, mean_of)
        made[axis_name("y", number)] = _axis(values[np.isfinite(values)], number)
    data.append(_clickable_steps(shown))
    return {"data": data, "layout": made}


def training_curves(
    table: Table, rank: int | None = None
) -> dict[str, tuple[NDArray[np.int64], Floats]]:
    """Return name → steps and values of the training statistics.

    Without any, these are two of the single numbers that were caught or traced, those with
    "loss" in their name first.
    """
    with table.lock:
        metrics = table.metrics(rank)
        if metrics or not table.has("value"):
            return metrics
        table = table.index()
        value = table.column("value")
        kind_of: dict[str, str] = {}
        for kind in (Kind.LOCAL.value, Kind.VALUE.value):
            if kind in table.kinds:
                rows = (table.kind == table.kinds.index(kind)) & ~np.isnan(value)
                names = np.unique(table.name[rows]).tolist()
                kind_of |= dict.fromkeys((table.names[code] for code in names), kind)
        first = sorted(kind_of, key=lambda name: ("loss" not in name.lower(), name))
        series = {name: table.series(kind_of[name], name, rank) for name in first[:2]}
        return {name: (table.step[rows], value[rows]) for name, rows in series.items()}


def _curve(
    steps: NDArray[np.int64], values: Floats, number: int, name: str, mean_of: str
) -> list[dict[str, Any]]:
    """Return a curve, and marks where it is not finite."""
    finite = np.isfinite(values)
    axis = axis_id("y", number)
    # beside a gap, plotly shows the next value: then the text says at which step that is
    hover = "%{y:.5~g}" + ("" if finite.all() else " at %{x}")
    line = line_trace(
        steps, np.where(finite, values, np.nan), 1000,
        line={"color": COLORS.lines[number], "width": 1.6}, name=text(name + mean_of),
        meta={"name": name}, yaxis=axis, hovertemplate=hover,
    )  # fmt: skip
    if finite.all():
        return [line]
    at = np.flatnonzero(~finite)[:_MAX_MARKS]
    low = float(values[finite].min()) if finite.any() else 1.0
    marks = marks_trace(
        steps[at], np.full(len(at), low), COLORS.nan, yaxis=axis, name="not finite",
        showlegend=False, hoverinfo="skip",  # the nearest mark may be far away
    )  # fmt: skip
    return [line, marks]


def _axis(values: Floats, number: int) -> dict[str, Any]:
    log = _all_positive_over_decades(values)
    fixed: dict[str, Any] = {}
    if len(values) and values.min() == values.max():  # plotly would show this number ± 1
        margin = abs(float(values[0])) / 2 or 1.0
        fixed = {"range": [float(values[0]) - margin, float(values[0]) + margin]}
    return {
        "nticks": 4, "exponentformat": "power", "showgrid": not number,
        **fixed, **(log_axis(values, 3) if log else {}),
        **({"overlaying": "y", "side": "right", "visible": number == 1} if number else {}),
    }  # fmt: skip


def _all_positive_over_decades(values: Floats) -> bool:
    return spans_decades(values) and bool(values.min() > 0)


def _clickable_steps(curves: Curves) -> dict[str, Any]:
    """Return an invisible line through every step: it takes clicks where a curve has a gap."""
    steps = np.unique(np.concatenate([steps for steps, _ in curves.values()]))
    if len(steps) > _MAX_CLICKABLE:
        steps = steps[np.linspace(0, len(steps) - 1, _MAX_CLICKABLE).round().astype(np.int64)]
    return {
        "type": "scatter", "mode": "lines", "name": "step", "yaxis": "y9", "opacity": 0,
        "x": typed(steps), "y": typed(np.full(len(steps), 0.5)), "showlegend": False,
        "line": {"width": 0}, "hovertemplate": "step %{x:,}<extra></extra>",
    }  # fmt: skip


def sparkline(
    values: NDArray[Any], *, width: int = 96, height: int = 20, steps: NDArray[Any] | None = None
) -> str:
    """Return values as the ``d`` of a small SVG path, with gaps where they are not finite.

    Where several values share a step (ranks, calls), the one farthest from zero is drawn.

    >>> import numpy as np
    >>> sparkline(np.array([0.0, 1.0, np.nan, 1.0, 0.0]), width=8, height=4)
    'M0 3.5L2 0.5M6 0.5L8 3.5'
    >>> sparkline(np.array([0.0, 0.5, 0.0, 1.0]), width=8, height=4, steps=np.array([0, 0, 1, 1]))
    'M0 3.5L8 0.5'
    """
    values = np.asarray(values, np.float64)
    steps = np.arange(len(values)) if steps is None else np.asarray(steps)
    values = np.where(np.isfinite(values), values, np.nan)
    starts = np.flatnonzero(np.diff(steps, prepend=steps[:1] - 1))
    if len(starts) < len(steps):
        low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
        steps, values = steps[starts], np.where(-low > high, low, high)
    good = values[~np.isnan(values)]
    if not len(good):
        return ""
    if _all_positive_over_decades(good):
        values, good = np.log10(values), np.log10(good)
    kept = decimate(steps, values, width)
    x, y = steps[kept].astype(np.float64), values[kept]
    x = (x - x[0]) / ((x[-1] - x[0]) or 1.0) * width
    bottom, top = float(good.min()), float(good.max())
    y = 0.5 + (height - 1) * ((top - y) / (top - bottom) if top > bottom else y * 0 + 0.5)
    path, pen = "", "M"
    for across, down in zip(x.tolist(), y.tolist(), strict=True):
        if down == down:
            path += f"{pen}{across:.1f}".removesuffix(".0") + f" {down:.1f}".removesuffix(".0")
        pen = "L" if down == down else "M"
    return path
