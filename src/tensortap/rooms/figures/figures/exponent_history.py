"""Exponents of one tensor over all steps, as a heatmap."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.page.encoding import Figure, Integers, text, typed
from tensortap.rooms.figures.figures.panels import step_line
from tensortap.rooms.figures.figures.theme import (
    LEGEND_RIGHT,
    FigureTheme,
    layout,
    message_figure,
    scale,
    theme_of,
)
from tensortap.rooms.figures.figures.traces import flat_trace, marks_trace
from tensortap.stats.formats import Limits
from tensortap.table.table import Table
from tensortap.text.tensors import number

_COLUMNS = 500
# an axis of powers of two
POWERS = {
    "tickprefix": "2<sup>", "ticksuffix": "</sup>", "showgrid": False, "zeroline": False,
}  # fmt: skip


class ExponentHistory(NamedTuple):
    """Exponent counts, one column per step (or per group of steps, if there are many)."""

    steps: Integers
    low: int
    counts: Integers
    bad: Integers  # how many values were not finite

    @property
    def shares(self) -> NDArray[np.float64]:
        """Return the share of each exponent at each step."""
        shares: NDArray[np.float64] = self.counts / np.maximum(1, self.counts.sum(axis=0))
        return shares


def steps_figure(
    table: Table,
    name: str,
    kind: str,
    step: int,
    rank: int | None,
    target: Limits | None,
    theme: str,
) -> Figure:
    """Return a heatmap of exponents by steps."""
    rows = table.series(kind, name, rank)
    history = _history(table, rows)
    if history is None:
        return _nothing(table, rows, name, kind, theme)
    colors = theme_of(theme)
    with np.errstate(divide="ignore"):
        z = np.where(history.counts > 0, np.log10(history.shares), np.nan)
    low = max(-7, math.floor(float(np.nanmin(z))))
    top = history.low + len(history.counts)
    decades = list(range(low, 1))
    cells = {
        "type": "heatmap", "x": typed(history.steps),
        "y": typed(np.arange(history.low, top) + 0.5), "z": typed(z.astype(np.float32)),
        "customdata": typed((history.shares * 100).astype(np.float32)),
        "zmin": low, "zmax": 0, "colorscale": scale(colors.size), "hoverongaps": False,
        "hovertemplate": "step %{x}<br>2<sup>%{y:.0f}</sup>: %{customdata:.3~g} %<extra></extra>",
        "colorbar": {
            "title": {"text": "share", "side": "top"}, "tickvals": decades,
            "ticktext": [f"{number(100 * 10.0**n)} %" for n in decades],
        },
    }  # fmt: skip
    data = [cells, *_not_finite(history, colors)]
    made = layout(
        theme,
        height=380,
        title={"text": f"{text(name)} · {kind}"},
        xaxis={"title": {"text": "step"}, "showgrid": False, "zeroline": False},
        yaxis={**POWERS, "nticks": 12},
        legend=LEGEND_RIGHT,
        showlegend=len(data) > 1,
        shapes=[step_line(step, "x", colors)],
        annotations=[],
        meta={"names": [name], "kind": kind, "step": step},
    )
    if target is not None:
        _draw_limits(made, target, colors)
        ends = [history.low - 1, top + 1, target.zero - 2, target.top + 3]
        made["yaxis"]["range"] = [min(ends), max(ends)]
    return {"data": data, "layout": made}


def _history(table: Table, rows: Integers) -> ExponentHistory | None:
    rows = table.without_recomputed(rows)
    if not len(rows):
        return None
    steps = np.unique(table.step[rows])
    wide = math.ceil(len(steps) / _COLUMNS)
    column = np.searchsorted(steps, table.step[rows]) // wide
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    each = table.exponents(rows)
    counts = np.add.reduceat(each.counts, starts, axis=1)
    bad = np.add.reduceat(table.nonfinite(rows), starts)
    filled = np.flatnonzero(counts.any(axis=1))
    if not len(filled):
        return None
    first, last = int(filled[0]), int(filled[-1])
    return ExponentHistory(steps[::wide], each.low + first, counts[first : last + 1], bad)


def _nothing(table: Table, rows: Integers, name: str, kind: str, theme: str) -> Figure:
    words = f"no exponents of {name} ({kind})"
    if table.nonfinite(rows).any():
        words = f"no value of {name} ({kind}) is finite"
    return message_figure(words, theme=theme)


def _not_finite(history: ExponentHistory, colors: FigureTheme) -> list[dict[str, Any]]:
    """Return marks for steps with NaN or Inf; steps without a finite value are painted."""
    at = np.flatnonzero(history.bad)
    if not len(at):
        return []
    top = history.low + len(history.counts)
    marks = marks_trace(
        history.steps[at], np.full(len(at), top + 0.5), colors.nan, size=7, edge=colors.page,
        name="not finite", customdata=typed(history.bad[at]),
        hovertemplate="step %{x}: <b>%{customdata:,} NaN or Inf</b><extra></extra>",
    )  # fmt: skip
    alone = (history.bad > 0) & ~history.counts.any(axis=0)
    if not alone.any():
        return [marks]
    hover = "step %{x}: <b>nothing is finite</b><extra></extra>"
    x, y = typed(history.steps), [history.low, top]
    return [flat_trace(alone[np.newaxis], x, y, colors.nan, hovertemplate=hover), marks]


def _draw_limits(made: Figure, target: Limits, colors: FigureTheme) -> None:
    """Add lines at the limits of a format to a layout."""
    over = math.log2(target.over)
    for at, word, side in (
        (target.zero, "underflow", "top"), (target.normal, "", ""), (over, "overflow", "bottom")
    ):  # fmt: skip
        made["shapes"].append({
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": at, "y1": at,
            "line": {"width": 1, "color": colors.bad, "dash": "solid" if word else "dot"},
        })  # fmt: skip
        if word:
            made["annotations"].append({
                "text": f"{word} of {text(target.dtype)}", "xref": "paper", "x": 1,
                "xanchor": "right", "yref": "y", "y": at, "yanchor": side, "showarrow": False,
                "font": {"size": 10, "color": colors.bad}, "bgcolor": colors.page,
            })  # fmt: skip
