"""Statistics over steps: small multiples with one axis of steps and one crosshair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.table.table import Table, locked
from tensortap.viz.figures.decimate import decimate
from tensortap.viz.figures.panels import (
    Grid,
    axis_id,
    axis_name,
    grid,
    heading,
    log_axis,
    step_line,
)
from tensortap.viz.figures.theme import (
    Figure,
    Theme,
    layout,
    message_figure,
    template_text,
    text,
    theme_of,
    typed,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Reals = NDArray[np.float64]
    Whole = NDArray[np.int64]

_LINES = 64  # in one panel
_PANELS = 48
_MARKS = 400  # of one line
_WIDE = 50.0  # a range that asks for a logarithmic axis


class Line(NamedTuple):
    """One statistic of one name and rank."""

    name: str
    metric: str
    rank: int
    step: Whole
    value: Reals
    known: NDArray[np.bool_]  # of others nothing is said, not even that they are not finite
    bad: Whole  # how many values of the tensor were not finite


@locked
def lines_figure(
    table: Table,
    *,
    names: Sequence[str],
    kind: str,
    metrics: Sequence[str],
    rank: int | None = None,
    log: bool | None = None,
    step: int | None = None,
    width_px: int = 900,
    col_wrap: int | None = None,
    panels: str | None = None,
    theme: str = "light",
) -> Figure:
    """The chosen statistics of the chosen names over all steps.

    `panels` is ``"metric"`` (a panel a statistic, a line a name) or ``"name"`` (a panel a name);
    by default what gives fewer lines in a panel. `log` is a logarithmic axis, by default where
    the values span decades. `step` is marked. Steps where a tensor holds anything that is not
    finite are marked; they and every extreme survive, however many points share a pixel.
    """
    by_name = panels == "name" or (panels is None and len(names) > 8)
    shown, left_out = _few(names, metrics, by_name)
    lines = list(_lines(table, shown, kind, metrics, rank))
    if not any(line.known.any() for line in lines):
        words = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        return message_figure(f"no {kind} statistics of {words or 'anything'}", theme=theme)
    look = theme_of(theme)
    keys = shown if by_name else list(metrics)
    where = grid(len(keys), col_wrap, 190 if len(keys) > 1 else 320)
    figure: Figure = {"data": [], "layout": _layout(keys, where, look, theme, step)}
    inner = dict.fromkeys(metrics if by_name else shown)
    colours = {key: look.lines[i % len(look.lines)] for i, key in enumerate(inner)}
    dashes = {key: _DASHES[(i // 8) % 4] for i, key in enumerate(colours)}
    for number, key in enumerate(keys):
        mine = [line for line in lines if (line.name if by_name else line.metric) == key]
        axis = figure["layout"][axis_name("y", number)]
        wants_log = _spans_decades(mine) if log is None else log
        if wants_log:
            axis.update(log_axis(_finite(mine)))
        for line in mine:
            label = line.metric if by_name else line.name
            style = {"color": colours[label], "width": 1.5, "dash": dashes[label]}
            place = {
                "xaxis": axis_id("x", number % where.columns),
                "yaxis": axis_id("y", number),
            }
            many = len({each.rank for each in mine}) > 1
            said = f"{label} · rank {line.rank}" if many else label
            figure["data"] += _traces(
                line, said, label, style, place, look, wants_log, width_px // where.columns,
                first=number == 0 and line.rank == mine[0].rank, low=_floor(mine),
            )  # fmt: skip
    crowded = len(lines) > 10 * len(keys)
    figure["layout"]["hovermode"] = "x" if crowded else "x unified"
    if left_out:
        figure["layout"]["annotations"].append(_note(left_out, look))
    figure["layout"]["meta"] = {"kind": kind, "names": list(shown), "metrics": list(metrics)}
    return figure


_DASHES = ("solid", "dash", "dot", "dashdot")


def _few(names: Sequence[str], metrics: Sequence[str], by_name: bool) -> tuple[list[str], str]:
    most = _PANELS if by_name else max(1, _LINES)
    if len(names) <= most:
        return list(names), ""
    return list(names[:most]), f"the first {most} of {len(names):,} names"


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
                value, known = table.column(metric)[mine], table.is_known(metric, mine)
                yield Line(name, metric, each, table.step[mine], value, known, bad)


def _traces(
    line: Line,
    said: str,
    group: str,
    style: dict[str, Any],
    place: dict[str, str],
    look: Theme,
    log: bool,
    width: int,
    *,
    first: bool,
    low: float,
) -> Iterator[dict[str, Any]]:
    """A line, and what cannot be on it: marks where the tensor was not finite, zeros on a log."""
    value = np.where(np.isfinite(line.value), line.value, np.nan)
    off = log & (value <= 0)
    drawn = np.where(off, np.nan, value)
    kept = decimate(line.step, drawn, max(100, width))
    label, safe = text(group), template_text(said)
    # beside a gap, hovering finds the next value: then it says of which step that is
    at_step = " at %{x}" if np.isnan(drawn).any() else ""
    shared = {**place, "legendgroup": text(group), "hoverlabel": {"namelength": -1}}
    yield {
        "type": "scatter",
        "mode": "lines+markers" if len(kept) <= 40 else "lines",
        "marker": {"size": 4},
        "x": typed(line.step[kept]),
        "y": typed(drawn[kept]),
        "name": label,
        "line": style,
        "connectgaps": False,
        "showlegend": first,
        "hovertemplate": f"%{{y:.5~g}}  {template_text(line.metric)}{at_step}<extra>{safe}</extra>",
        **shared,
    }
    if off.any():
        at = np.flatnonzero(off)[:: max(1, int(off.sum()) // _MARKS)]
        yield {
            "type": "scatter",
            "mode": "markers",
            "x": typed(line.step[at]),
            "y": typed(np.full(len(at), low)),
            "customdata": typed(value[at]),
            "name": label,
            "marker": {"symbol": "triangle-down-open", "size": 7, "color": style["color"]},
            "showlegend": False,
            "hovertemplate": "%{customdata:.5~g} at %{x}, not on a logarithmic axis",
            **shared,
        }
    bad = ((line.bad > 0) | ~np.isfinite(line.value)) & line.known
    if bad.any():
        at = _one_a_pixel(line.step, line.bad, np.flatnonzero(bad), width)
        level = _before(drawn, at, low)
        yield {
            "type": "scatter",
            "mode": "markers",
            "x": typed(line.step[at]),
            "y": typed(level),
            "customdata": typed(line.bad[at]),
            "name": "not finite",
            "marker": {
                "symbol": "x",
                "size": 8,
                "color": look.nan,
                "line": {"width": 1, "color": look.page},
            },
            "showlegend": False,
            "hovertemplate": f"{safe}: %{{customdata}} not finite at step %{{x}}<extra></extra>",
            **shared,
        }


def _one_a_pixel(step: Whole, count: Whole, at: Whole, width: int) -> Whole:
    """Of marks that would lie on each other the one with the largest count."""
    if len(at) <= _MARKS:
        return at
    span = max(1, int(step[-1] - step[0]))
    pixel = (step[at] - step[0]) * min(width, _MARKS) // span
    best: dict[int, int] = {}
    for place, row in zip(pixel.tolist(), at.tolist(), strict=True):
        if place not in best or count[row] > count[best[place]]:
            best[place] = row
    return np.array(sorted(best.values()), np.int64)


def _before(value: Reals, at: Whole, low: float) -> Reals:
    """The value at a step, or the last one before it that can be drawn."""
    good = np.where(np.isnan(value), -1, np.arange(len(value)))
    last = np.maximum.accumulate(good)[at]
    return np.where(last >= 0, value[last], low)


def _finite(lines: Sequence[Line]) -> Reals:
    whole: Reals = np.concatenate([np.empty(0), *(line.value for line in lines)])
    return whole[np.isfinite(whole)]


def _spans_decades(lines: Sequence[Line]) -> bool:
    found = _finite(lines)
    above = found[found > 0]
    if not len(above) or (found < 0).any():
        return False
    return bool(above.max() > _WIDE * above.min())


def _floor(lines: Sequence[Line]) -> float:
    """Where to put what has no place: the lowest that is drawn."""
    found = _finite(lines)
    above = found[found > 0]
    return float(above.min()) if len(above) else float(found.min()) if len(found) else 1.0


def _layout(
    keys: Sequence[str], where: Grid, look: Theme, theme: str, step: int | None
) -> dict[str, Any]:
    made = layout(
        theme,
        height=where.height,
        margin={"l": 56, "r": 16, "t": where.top, "b": where.bottom},
        hoversubplots="axis",
        annotations=[heading(key, where, i, look) for i, key in enumerate(keys)],
        legend={"yref": "container", "y": 1, "yanchor": "top"},
        shapes=[],
    )
    for column in range(where.columns):
        below = [n for n in range(where.panels) if n % where.columns == column][-1]
        made[axis_name("x", column)] = {
            "domain": where.domain(column)[0],
            "anchor": axis_id("y", below),
            "showspikes": True,
            "spikemode": "across",
            "spikesnap": "cursor",
            "title": {"text": "step"},
            "rangemode": "normal",
            **({"matches": "x"} if column else {}),
        }
        if step is not None:
            made["shapes"].append(step_line(step, axis_id("x", column), look))
    for number in range(where.panels):
        made[axis_name("y", number)] = {
            "domain": where.domain(number)[1],
            "anchor": axis_id("x", number % where.columns),
            "nticks": 5,
            "exponentformat": "power",
        }
    return made


def _note(words: str, look: Theme) -> dict[str, Any]:
    return {
        "text": words,
        "x": 1,
        "y": 1,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "right",
        "yanchor": "bottom",
        "yshift": 4,
        "showarrow": False,
        "font": {"size": 11, "color": look.dim},
    }
