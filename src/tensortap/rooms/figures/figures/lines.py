"""Statistics over steps: small multiples with a common axis of steps and one crosshair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.page.encoding import typed
from tensortap.rooms.figures.figures.parts import (
    PanelGrid,
    axis_id,
    axis_name,
    left_out_note,
    line_trace,
    log_axis,
    marks_trace,
    panel_grid,
    panel_title,
    spans_decades,
    step_line,
)
from tensortap.rooms.figures.figures.theme import (
    AUTO,
    COLORS,
    Figure,
    Floats,
    Integers,
    layout,
    message_figure,
    some_names,
    statistic_text,
    template_text,
    text,
)
from tensortap.table.columns import VALUE
from tensortap.table.table import Table, locked

_MAX_LINES = 64  # per panel
_MAX_PANELS = 48
_MAX_MARKS = 400  # per line
_SYMBOLS = ("circle", "diamond-open", "square-open", "triangle-up-open")
_DASHES = ("solid", "dash", "dot", "dashdot")


class Line(NamedTuple):
    """One statistic of one name and rank over the steps."""

    kind: str
    name: str
    metric: str
    rank: int
    step: Integers
    value: Floats
    known: NDArray[np.bool_]  # whether the statistic was recorded, even as NaN
    bad: Integers  # how many values of the tensor were not finite


class Panel(NamedTuple):
    """The area in which lines are drawn."""

    axes: dict[str, str]
    log: bool
    floor: float  # where to put marks that have no value
    pixels: int


@locked
def lines_figure(
    table: Table,
    *,
    names: Sequence[str] | Mapping[str, Sequence[str]],
    kind: str,
    metrics: Sequence[str],
    rank: int | None = None,
    scatter: bool = False,
    log: bool | None = None,
    step: int | None = None,
    width_px: int = 900,
    col_wrap: int | None = None,
    panels: str | None = None,
) -> Figure:
    """Return the chosen statistics of the chosen names over all steps.

    `panels` is ``"metric"`` (one panel per statistic, one line per name) or ``"name"``; by default
    it depends on the number of names. Names by kind get one panel per kind. `scatter` draws points
    instead of lines. `log` is by default on where values span decades. `step` is marked. Steps at
    which a tensor is not finite are marked, and no extreme value is left out, however many points
    share a pixel.
    """
    by_kind = dict(names) if isinstance(names, Mapping) else {kind: names}
    names = list(dict.fromkeys(name for own in by_kind.values() for name in own))
    if len(by_kind) > 1:
        panels = "kind"
    elif panels is None:
        panels = "name" if len(names) > 8 else "metric"
    shown = names[: _MAX_PANELS if panels == "name" else _MAX_LINES]
    lines = [
        line for each, own in by_kind.items()
        for line in _lines(table, [name for name in own if name in shown], each, metrics, rank)
    ]  # fmt: skip
    if not any(line.known.any() for line in lines):
        return message_figure(f"no {kind} statistics of {some_names(names)}")
    keys = {"name": shown, "metric": metrics, "kind": list(by_kind)}[panels]
    grid = panel_grid(len(keys), col_wrap, 190 if len(keys) > 1 else 320)
    made = _layout(keys, grid, step)
    styles = _styles(dict.fromkeys(_label(line, panels, metrics) for line in lines), scatter)
    data: list[dict[str, Any]] = []
    listed: set[str] = set()  # labels that are in the legend
    for number, key in enumerate(keys):
        mine = [line for line in lines if key == getattr(line, panels)]
        panel = _panel(mine, number, log, made, grid, width_px)
        ranks = {line.rank for line in mine}
        for line in mine:
            label = _label(line, panels, metrics)
            hover = f"{label} · rank {line.rank}" if len(ranks) > 1 else label
            legend = label not in listed
            listed.add(label)
            data += _traces(line, panel, styles[label], text(label), template_text(hover), legend)
    made["hovermode"] = "x" if len(lines) > 10 * len(keys) else "x unified"
    made["annotations"] += left_out_note(len(shown), len(names))
    made["meta"] = {"kind": kind, "names": shown, "metrics": list(metrics)}
    return {"data": data, "layout": made}


def _styles(labels: Iterable[str], scatter: bool) -> dict[str, dict[str, Any]]:
    """Return the line of each label and, for points, its marker, as options of a trace."""
    styles: dict[str, dict[str, Any]] = {}
    for i, label in enumerate(labels):
        color = COLORS.lines[i % 8]
        styles[label] = {"line": {"color": color, "width": 1.5, "dash": _DASHES[i // 8 % 4]}}
        if scatter:
            # open symbols, so that points on top of each other can be told apart
            marker = {"color": color, "symbol": _SYMBOLS[i % 4], "size": 8 if i % 4 else 5}
            styles[label] |= {"mode": "markers", "marker": marker}
    return styles


def _panel(
    lines: Sequence[Line],
    number: int,
    log: bool | None,
    made: dict[str, Any],
    grid: PanelGrid,
    width: int,
) -> Panel:
    """Return the panel of some lines, after its axis was made logarithmic where that helps."""
    values = np.concatenate([np.empty(0), *(line.value for line in lines)])
    values = values[np.isfinite(values)]
    wants_log = spans_decades(values) if log is None else log
    if wants_log:
        made[axis_name("y", number)].update(log_axis(values))
    axes = {"xaxis": axis_id("x", number % grid.columns), "yaxis": axis_id("y", number)}
    drawable = values[values > 0] if (values > 0).any() else values
    floor = float(drawable.min()) if len(drawable) else 1.0
    return Panel(axes, wants_log, floor, width // grid.columns)


def _label(line: Line, panels: str, metrics: Sequence[str]) -> str:
    """Return what tells a line from the others in its panel."""
    if panels == "name":
        return statistic_text(line.metric)
    several = panels == "kind" and len(metrics) > 1
    return f"{line.name} · {statistic_text(line.metric)}" if several else line.name


def _lines(
    table: Table, names: Sequence[str], kind: str, metrics: Sequence[str], rank: int | None
) -> Iterator[Line]:
    for name in names:
        rows = table.series(kind, name, rank)
        ranks = np.unique(table.rank[rows]).tolist() if len(rows) else [rank or 0]
        for each in ranks:
            mine = rows if len(ranks) == 1 else rows[table.rank[rows] == each]
            bad = table.nonfinite(mine)
            for metric in metrics:
                own = metric
                if metric == AUTO:
                    own = VALUE if table.has_number(mine).any() else "rm2"
                value, known = table.column(own)[mine], table.is_known(own, mine)
                yield Line(kind, name, metric, each, table.step[mine], value, known, bad)


def _traces(
    line: Line, panel: Panel, style: dict[str, Any], label: str, hover: str, legend: bool
) -> Iterator[dict[str, Any]]:
    """Yield a line, zeros that a logarithmic axis cannot show, and steps that are not finite."""
    value = np.where(np.isfinite(line.value), line.value, np.nan)
    off = panel.log & (value <= 0)
    drawn = np.where(off, np.nan, value)
    shared: dict[str, Any] = {**panel.axes, "legendgroup": label}
    # beside a gap, plotly shows the next value: then the text says at which step that is
    at_step = " at %{x}" if np.isnan(drawn).any() else ""
    metric = statistic_text(line.metric)
    yield line_trace(
        line.step, drawn, max(100, panel.pixels), name=label, showlegend=legend,
        hovertemplate=f"%{{y:.5~g}}  {template_text(metric)}{at_step}<extra>{hover}</extra>",
        **shared, **style,
    )  # fmt: skip
    if off.any():
        at = _some(off)
        yield marks_trace(
            line.step[at], np.full(len(at), panel.floor), style["line"]["color"], size=7,
            symbol="triangle-down-open", name=label, showlegend=False, customdata=typed(value[at]),
            hovertemplate="%{customdata:.5~g} at %{x}, not on a logarithmic axis", **shared,
        )  # fmt: skip
    bad = ((line.bad > 0) | ~np.isfinite(line.value)) & line.known
    if bad.any():
        at = _some(bad)
        yield marks_trace(
            line.step[at], _last_values(drawn, at, panel.floor), COLORS.nan, edge=COLORS.page,
            name="not finite", showlegend=False, customdata=typed(line.bad[at]),
            hovertemplate=f"{hover}: %{{customdata}} not finite at step %{{x}}<extra></extra>",
            **shared,
        )  # fmt: skip


def _some(mask: NDArray[np.bool_]) -> Integers:
    """Return the places of a mask, evenly thinned if there are many."""
    at = np.flatnonzero(mask)
    return at[:: max(1, len(at) // _MAX_MARKS)]


def _last_values(value: Floats, at: Integers, floor: float) -> Floats:
    """Return the value at each place, or the last one before it that can be drawn."""
    good = np.where(np.isnan(value), -1, np.arange(len(value)))
    last = np.maximum.accumulate(good)[at]
    return np.where(last >= 0, value[last], floor)


def _layout(keys: Sequence[str], grid: PanelGrid, step: int | None) -> Figure:
    made = layout(
        height=grid.height,
        margin={"l": 56, "r": 16, "t": grid.top, "b": grid.bottom},
        hoversubplots="axis",
        annotations=[panel_title(statistic_text(key), grid, i) for i, key in enumerate(keys)],
        legend={"yref": "container", "y": 1, "yanchor": "top"},
        shapes=[],
    )
    for column in range(grid.columns):
        lowest = range(column, grid.panels, grid.columns)[-1]
        made[axis_name("x", column)] = {
            "domain": grid.domain(column)[0], "anchor": axis_id("y", lowest), "showspikes": True,
            "spikemode": "across", "spikesnap": "cursor", "title": {"text": "step"},
            "rangemode": "normal", **({"matches": "x"} if column else {}),
        }  # fmt: skip
        if step is not None:
            made["shapes"].append(step_line(step, axis_id("x", column)))
    for number in range(grid.panels):
        made[axis_name("y", number)] = {
            "domain": grid.domain(number)[1], "anchor": axis_id("x", number % grid.columns),
            "nticks": 5, "exponentformat": "power",
        }  # fmt: skip
    return made
