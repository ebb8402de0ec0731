"""Exponent histograms, with the range of a format drawn over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.stats.formats import Exponents, Limits, limits, losses
from tensortap.table.table import Table, locked
from tensortap.viz.figures.panels import axis_id, axis_name, grid, heading, step_line
from tensortap.viz.figures.theme import (
    Figure,
    Theme,
    layout,
    message_figure,
    number,
    scale,
    share,
    text,
    theme_of,
    typed,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Whole = NDArray[np.int64]

_STEPS = 500  # columns of the picture over all steps
_RIDGES = 24
_PANELS = 48


class Found(NamedTuple):
    """All that was captured under a name at a step, calls and ranks together."""

    exponents: Exponents
    zeros: int
    nans: int
    infs: int
    dtype: str
    below: int  # values of which the exponent was not counted: too small, too large
    above: int


@locked
def exponents_figure(
    table: Table,
    *,
    name: str | Sequence[str],
    kind: str,
    step: int,
    rank: int | None = None,
    dtype_annotation: str | None = None,
    over: str | None = None,
    col_wrap: int | None = None,
    log: bool = False,
    theme: str = "light",
) -> Figure:
    """How the values of tensors are spread over powers of two at a step.

    `dtype_annotation` draws the range of a format over it and says which shares are lost there.
    Several names are small multiples. ``over="steps"`` shows all steps, as a heatmap;
    ``over="ridge"`` as curves one behind the other.
    """
    names = [name] if isinstance(name, str) else list(name)
    target = None if dtype_annotation is None else limits(dtype_annotation)
    if over not in (None, "steps", "ridge"):
        raise ValueError(f"over is 'steps' or 'ridge', not {over!r}")
    if over is not None:
        draw = _over_steps if over == "steps" else _ridge
        return draw(table, names[0], kind, step, rank, target, theme)
    left_out = len(names) - _PANELS
    names = names[:_PANELS]
    found = [(each, _at(table, each, kind, step, rank)) for each in names]
    there = [(each, one) for each, one in found if one is not None]
    if not there:
        words = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        return message_figure(f"no exponents of {words} ({kind}) at step {step}", theme=theme)
    look = theme_of(theme)
    several = len(there) > 1
    where = grid(
        len(there), col_wrap or (min(3, len(there)) if several else 1), 200 if several else 320,
        top=56, gap=70,
    )  # fmt: skip
    made = layout(
        theme,
        height=where.height,
        margin={"l": 52, "r": 16, "t": where.top, "b": where.bottom},
        bargap=0,
        showlegend=False,
        hovermode="x",
        annotations=[],
        shapes=[],
        meta={"names": [each for each, _ in there], "kind": kind, "step": step},
    )
    data = []
    low, high = _span([one for _, one in there], target)
    for place, (each, one) in enumerate(there):
        x, y = axis_id("x", place), axis_id("y", place)
        data.append(_bars(one, target, x, y, look))
        domain = where.domain(place)
        made[axis_name("x", place)] = {
            "domain": domain[0], "anchor": y, "range": [low, high], "showgrid": False,
            "tickprefix": "2<sup>", "ticksuffix": "</sup>", "nticks": 10 if several else 24,
            "tick0": 0, "zeroline": False, **({"matches": "x"} if place else {}),
        }  # fmt: skip
        made[axis_name("y", place)] = {
            "domain": domain[1], "anchor": x, "ticksuffix": " %", "nticks": 5,
            **({"type": "log"} if log else {"range": [0, _room(data[-1])]}),
        }  # fmt: skip
        title = heading(each if several else f"{each} · {kind} · step {step:,}", where, place, look)
        title["yshift"] = 18
        made["annotations"] += [title, _said(one, target, title, several, look)]
        if target is not None:
            made["shapes"] += _range(target, x, y, look)
            if not place:
                span = (high - low) * (3 if several else 1)
                made["annotations"] += _range_words(target, x, y, look, span)
    if left_out > 0:
        made["meta"]["left_out"] = left_out
    return {"data": data, "layout": made}


def _at(table: Table, name: str, kind: str, step: int, rank: int | None) -> Found | None:
    rows = table.series(kind, name, rank)
    rows = table.without_recomputed(rows[table.step[rows] == step])
    if not len(rows):
        return None
    each = table.exponents(rows)
    if not each.counts.any() and not _sum(table, "count", rows):
        return None
    whole = Exponents(
        each.low,
        each.counts.sum(axis=1, keepdims=True),
        np.fmin.reduce(each.min_abs)[None],
        np.fmax.reduce(each.max_abs)[None],
    )
    infs = _sum(table, "posinfs", rows) + _sum(table, "neginfs", rows)
    dtype = table.dtypes[table.dtype[rows[0]]]
    below, above = (int(each.sum()) for each in table.outside_range(rows))
    zeros, nans = _sum(table, "zeros", rows), _sum(table, "nans", rows)
    return Found(whole, zeros, nans, infs, dtype, below, above)


def _sum(table: Table, statistic: str, rows: Whole) -> int:
    return int(np.nan_to_num(table.column(statistic)[rows]).sum()) if table.has(statistic) else 0


def _span(found: Sequence[Found], target: Limits | None) -> tuple[int, int]:
    """The exponents that are drawn: all that occur, and the range of the format."""
    ends = [] if target is None else [target.zero - 2, target.top + 3]
    for one in found:
        filled = np.flatnonzero(one.exponents.counts.any(axis=1))
        if len(filled):
            ends += [
                one.exponents.low + int(filled[0]) - 1, one.exponents.low + int(filled[-1]) + 2
            ]  # fmt: skip
    return (min(ends), max(ends)) if ends else (-8, 8)


def _bars(one: Found, target: Limits | None, x: str, y: str, look: Theme) -> dict[str, Any]:
    counts = one.exponents.counts[:, 0]
    filled = np.flatnonzero(counts)
    bins = np.arange(filled[0], filled[-1] + 1) if len(filled) else filled
    exponent = one.exponents.low + bins
    total = max(1, int(counts.sum()))
    colours = [_fate(n, target, look) for n in exponent.tolist()]
    return {
        "type": "bar",
        "x": exponent.tolist(),
        "y": (counts[bins] / total * 100).tolist(),
        "customdata": counts[bins].tolist(),
        "offset": 0,
        "width": 1,
        "marker": {"color": colours, "line": {"width": 0.6, "color": look.page}},
        "xaxis": x,
        "yaxis": y,
        "hovertemplate": "2<sup>%{x}</sup> ≤ |x| &lt; twice that<br>%{customdata:,} values, "
        "%{y:.4~g} %<extra></extra>",
    }


def _room(bars: dict[str, Any]) -> float:
    """The height of a panel: the bars, and the words above them."""
    return 1.16 * max(bars["y"], default=0.0) or 1.0


def _fate(exponent: int, target: Limits | None, look: Theme) -> str:
    if target is None:
        return look.good
    if exponent < target.zero or exponent > target.top:
        return look.bad
    return look.fair if exponent < target.normal else look.good


def _said(
    one: Found, target: Limits | None, title: dict[str, Any], several: bool, look: Theme
) -> dict[str, Any]:
    """The shares that are lost, and what has no exponent, below a panel's title."""
    words = []
    if target is not None:
        words = shares_words(one.exponents, target, look, short=several)
    extra = (
        (one.below, "below the range that was counted", look.bad),
        (one.above, "above it", look.bad),
        (one.zeros, "zero", look.dim),
        (one.nans, "NaN", look.nan),
        (one.infs, "Inf", look.nan),
    )
    words += [
        f'<span style="color:{colour}">{count:,} {word}</span>'
        for count, word, colour in extra
        if count
    ]
    if target is None and not several:
        words.append(text(one.dtype))
    return {
        **title,
        "text": " · ".join(words),
        "yshift": 2,
        "font": {"size": 11, "color": look.dim},
    }


def shares_words(
    found: Exponents, target: Limits, look: Theme, *, short: bool = False
) -> list[str]:
    """What is lost in a format, in words; a range where the exponents leave it open."""
    loss = losses(found, target)
    values = int(loss.values[0])
    if not values:
        return ["no nonzero values"]
    pairs = (
        ("underflow", loss.underflow, loss.underflow_at_most, look.bad),
        ("subnormal", loss.subnormal, loss.subnormal, look.fair),
        ("overflow", loss.overflow, loss.overflow_at_most, look.bad),
    )
    words = []
    for called, least, most, colour in pairs:
        one, other = (share(int(count[0]) / values) for count in (least, most))
        said = one if one == other else f"{one.removesuffix(' %')} to {other}"
        shown = colour if most[0] else look.dim
        if most[0] or not short:
            words.append(f'<span style="color:{shown}">{said} {called}</span>')
    return words or ["nothing is lost"]


def _range(target: Limits, x: str, y: str, look: Theme) -> list[dict[str, Any]]:
    """The normal and the subnormal range of a format, behind the bars."""
    top = math.log2(target.over)
    bands = ((target.zero, target.normal, look.fair), (target.normal, top, look.good))
    shapes: list[dict[str, Any]] = [
        {
            "type": "rect", "xref": x, "yref": f"{y} domain", "x0": start, "x1": end, "y0": 0,
            "y1": 1, "fillcolor": colour, "opacity": 0.12, "line": {"width": 0}, "layer": "below",
        }
        for start, end, colour in bands
        if end > start
    ]  # fmt: skip
    for at, dash in ((target.zero, "dot"), (target.normal, "dot"), (top, "solid")):
        shapes.append({
            "type": "line", "xref": x, "yref": f"{y} domain", "x0": at, "x1": at, "y0": 0, "y1": 1,
            "line": {"width": 1, "color": look.dim, "dash": dash}, "layer": "below",
        })  # fmt: skip
    return shapes


def _range_words(target: Limits, x: str, y: str, look: Theme, span: int) -> list[dict[str, Any]]:
    middle = (target.normal + math.log2(target.over)) / 2
    note = {
        "xref": x, "yref": f"{y} domain", "y": 1, "yanchor": "top", "showarrow": False,
        "font": {"size": 10, "color": look.dim},
    }  # fmt: skip
    words = [{**note, "x": middle, "text": text(target.dtype)}]
    if target.normal - target.zero > 0.08 * span:
        words.append({**note, "x": (target.zero + target.normal) / 2, "text": "subnormal"})
    return words


# -- over all steps ------------------------------------------------------------------------


class History(NamedTuple):
    """The exponents of a name, a column a step (or several steps, where there are many)."""

    steps: Whole
    low: int
    counts: Whole
    bad: Whole  # how many values were not finite, which have no exponent


def _history(
    table: Table, name: str, kind: str, rank: int | None, most: int, *, chosen: Whole | None = None
) -> History | None:
    rows = table.series(kind, name, rank)
    if chosen is not None:
        rows = rows[np.isin(table.step[rows], chosen)]
    rows = table.without_recomputed(rows)
    if not len(rows):
        return None
    steps = np.unique(table.step[rows])
    wide = max(1, math.ceil(len(steps) / most))
    column = np.searchsorted(steps, table.step[rows]) // wide
    each = table.exponents(rows)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    counts = np.add.reduceat(each.counts, starts, axis=1)
    bad = np.add.reduceat(table.nonfinite(rows), starts)
    filled = np.flatnonzero(counts.any(axis=1))
    if not len(filled):
        return None
    first, last = int(filled[0]), int(filled[-1])
    return History(steps[::wide], each.low + first, counts[first : last + 1], bad)


def _none(table: Table, name: str, kind: str, rank: int | None, theme: str) -> Figure:
    """Why there is nothing to draw."""
    rows = table.series(kind, name, rank)
    finite = "no value of" if table.nonfinite(rows).any() else "no exponents of"
    also = " is finite" if table.nonfinite(rows).any() else ""
    return message_figure(f"{finite} {name} ({kind}){also}", theme=theme)


def _not_finite(found: History, look: Theme) -> list[dict[str, Any]]:
    """Steps at which something was not finite, marked; coloured where nothing else was there."""
    at = np.flatnonzero(found.bad)
    if not len(at):
        return []
    top = found.low + len(found.counts)
    alone = (found.bad > 0) & ~found.counts.any(axis=0)
    count = found.bad[at]
    marks = {
        "type": "scatter", "mode": "markers", "name": "not finite", "x": typed(found.steps[at]),
        "y": typed(np.full(len(at), top + 0.5)), "customdata": typed(count),
        "marker": {
            "symbol": "x", "size": 7, "color": look.nan, "line": {"width": 1, "color": look.page},
        },
        "hovertemplate": "step %{x}: <b>%{customdata:,} NaN or Inf</b><extra></extra>",
    }  # fmt: skip
    if not alone.any():
        return [marks]
    z = np.where(alone, 1.0, np.nan).astype(np.float32)
    flat = {
        "type": "heatmap", "x": typed(found.steps), "y": [found.low, top],
        "z": typed(z[np.newaxis]), "zmin": 0, "zmax": 1,
        "colorscale": [[0, look.nan], [1, look.nan]], "showscale": False, "hoverongaps": False,
        "hovertemplate": "step %{x}: <b>nothing is finite</b><extra></extra>",
    }  # fmt: skip
    return [flat, marks]


def _over_steps(
    table: Table,
    name: str,
    kind: str,
    step: int,
    rank: int | None,
    target: Limits | None,
    theme: str,
) -> Figure:
    found = _history(table, name, kind, rank, _STEPS)
    if found is None:
        return _none(table, name, kind, rank, theme)
    look = theme_of(theme)
    parts = found.counts / np.maximum(1, found.counts.sum(axis=0))
    with np.errstate(divide="ignore"):
        z = np.where(parts > 0, np.log10(parts), np.nan)
    low = max(-7, math.floor(float(np.nanmin(z))))
    exponent = found.low + np.arange(len(parts))
    ticks = list(range(low, 1))
    data = [{
        "type": "heatmap", "x": typed(found.steps), "y": typed(exponent + 0.5),
        "z": typed(z.astype(np.float32)), "customdata": typed((parts * 100).astype(np.float32)),
        "zmin": low, "zmax": 0, "colorscale": scale(look.size), "hoverongaps": False,
        "hovertemplate": "step %{x}<br>2<sup>%{y:.0f}</sup>: %{customdata:.3~g} %<extra></extra>",
        "colorbar": {
            "title": {"text": "share", "side": "top"}, "tickvals": ticks,
            "ticktext": [f"{number(100 * 10.0**n)} %" for n in ticks],
        },
    }, *_not_finite(found, look)]  # fmt: skip
    made = layout(
        theme,
        height=380,
        margin={"l": 52, "r": 16, "t": 44, "b": 48},
        title={"text": f"{text(name)} · {kind}"},
        xaxis={"title": {"text": "step"}, "showgrid": False, "zeroline": False},
        yaxis={
            "tickprefix": "2<sup>", "ticksuffix": "</sup>", "showgrid": False, "zeroline": False,
            "nticks": 12,
        },
        hovermode="closest",
        legend={"x": 1, "xanchor": "right"},
        showlegend=len(data) > 1,
        shapes=[step_line(step, "x", look)],
        annotations=[],
        meta={"names": [name], "kind": kind, "step": step},
    )  # fmt: skip
    if target is not None:
        over = math.log2(target.over)
        for at, word, side in (
            (target.zero, "underflow", "top"), (target.normal, "", ""), (over, "overflow", "bottom")
        ):  # fmt: skip
            made["shapes"].append({
                "type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": at, "y1": at,
                "line": {"width": 1, "color": look.bad, "dash": "solid" if word else "dot"},
            })  # fmt: skip
            if word:
                made["annotations"].append({
                    "text": f"{word} of {text(target.dtype)}", "xref": "paper", "x": 1,
                    "xanchor": "right", "yref": "y", "y": at, "yanchor": side, "showarrow": False,
                    "font": {"size": 10, "color": look.bad}, "bgcolor": look.page,
                })  # fmt: skip
        ends = [found.low - 1, found.low + len(parts) + 1, target.zero - 2, target.top + 3]
        made["yaxis"]["range"] = [min(ends), max(ends)]
    return {"data": data, "layout": made}


def _ridge(
    table: Table,
    name: str,
    kind: str,
    step: int,
    rank: int | None,
    target: Limits | None,
    theme: str,
) -> Figure:
    steps = table.steps(kind, name)
    if len(steps) > _RIDGES:
        spread = steps[np.linspace(0, len(steps) - 1, _RIDGES).round().astype(int)]
        steps = np.unique(np.append(spread, step if step in steps else spread[0]))
    found = _history(table, name, kind, rank, _RIDGES + 1, chosen=steps)
    if found is None:
        return _none(table, name, kind, rank, theme)
    look = theme_of(theme)
    parts = found.counts / np.maximum(1, found.counts.sum(axis=0))
    peak = float(parts.max())
    count = len(found.steps)
    edges = np.repeat(np.arange(found.low, found.low + len(parts) + 1), 2)
    data = []
    for place in reversed(range(count)):  # from the back to the front: the first step is in front
        height = np.concatenate([[0], np.repeat(parts[:, place], 2), [0]]) / peak * 2.6
        chosen, bad = int(found.steps[place]) == step, int(found.bad[place])
        colour = look.nan if bad else look.marked if chosen else look.good
        said = f": {bad:,} NaN or Inf" if bad else ""
        data.append({
            "type": "scatter", "mode": "lines", "x": typed(edges), "y": typed(height + place),
            "line": {"color": colour, "width": 1.6 if chosen or bad else 1},
            "fill": "toself", "fillcolor": _mixed(look.good, look.page, 0.55),
            "name": f"step {int(found.steps[place]):,}{said}", "hoverinfo": "name",
            "hoveron": "fills", "showlegend": False,
        })  # fmt: skip
    if found.bad.any():
        data.append({
            "type": "scatter", "mode": "lines", "name": "holds NaN or Inf", "x": [None],
            "y": [None], "line": {"color": look.nan, "width": 1.6},
        })  # fmt: skip
    ticks = list(range(0, count, max(1, count // 8)))
    made = layout(
        theme,
        height=460,
        margin={"l": 64, "r": 16, "t": 44, "b": 48},
        title={"text": f"{text(name)} · {kind}"},
        xaxis={"tickprefix": "2<sup>", "ticksuffix": "</sup>", "nticks": 24, "showgrid": False,
               "zeroline": False},
        yaxis={"title": {"text": "step"}, "tickvals": ticks, "showgrid": False, "zeroline": False,
               "ticktext": [f"{int(found.steps[i]):,}" for i in ticks]},
        shapes=[] if target is None else _range(target, "x", "y", look),
        annotations=[] if target is None else _range_words(target, "x", "y", look, len(parts)),
        hovermode="closest",
        legend={"x": 1, "xanchor": "right"},
        showlegend=bool(found.bad.any()),
        meta={"names": [name], "kind": kind, "step": step},
    )  # fmt: skip
    return {"data": data, "layout": made}


def _mixed(one: str, other: str, part: float) -> str:
    """A colour between two."""
    pairs = zip(*([int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (one, other)), strict=True)
    return "#" + "".join(f"{round(a * part + b * (1 - part)):02x}" for a, b in pairs)
