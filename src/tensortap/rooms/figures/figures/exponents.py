"""Exponent histograms at one step, with the range of a number format drawn over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensortap.page.encoding import Figure, share, some_names, text, typed
from tensortap.rooms.figures.figures.exponent_history import POWERS, steps_figure
from tensortap.rooms.figures.figures.panels import (
    PanelGrid,
    axis_id,
    axis_name,
    left_out_note,
    panel_grid,
    panel_title,
)
from tensortap.rooms.figures.figures.theme import FigureTheme, layout, message_figure, theme_of
from tensortap.stats.formats import Exponents, Limits, has_limits, limits, losses
from tensortap.table.table import Table, locked

_MAX_PANELS = 48
_FINE = 8  # points of a density per power of two
_BANDWIDTH = 0.5  # of a density, in powers of two

Formats = bool | str | Sequence[str] | None
LOGGED = "logged dtype"  # the dtype that each tensor had


class StepExponents(NamedTuple):
    """The values of a tensor at one step, all calls and ranks together."""

    exponents: Exponents
    zeros: int
    nans: int
    infs: int
    dtype: str
    below: int  # values whose exponents lie below the counted range
    above: int


@locked
def exponents_figure(
    table: Table,
    *,
    name: str | Sequence[str] | Mapping[str, Sequence[str]],
    kind: str,
    step: int,
    rank: int | None = None,
    dtype_annotation: Formats = None,
    shape: str = "bar",
    over: str | None = None,
    col_wrap: int | None = None,
    log: bool = False,
    theme: str = "light",
) -> Figure:
    """Return how the values of tensors are spread over powers of two at a step.

    `dtype_annotation` draws the range of a number format, with the shares that it would lose;
    of several, or of the dtype that each tensor had (True). Several names, or names by kind,
    become small multiples. `shape` is ``"bar"``, ``"line"`` or ``"kde"``, a smooth density.
    ``over="steps"`` shows all steps as a heatmap.
    """
    by_kind = dict(name) if isinstance(name, Mapping) else {kind: _listed(name)}
    places = [(each, own) for own, names in by_kind.items() for each in names]
    formats = format_names(dtype_annotation)
    _check(over, shape, formats)
    if over is not None:
        target = [*_limits(formats, _read(table, *places[0], step, rank)), None][0]
        return steps_figure(table, *places[0], step, rank, target, theme)
    read = ((place, _read(table, *place, step, rank)) for place in places[:_MAX_PANELS])
    shown = {place: values for place, values in read if values is not None}
    if not shown:
        names = some_names([each for each, _ in places])
        return message_figure(f"no exponents of {names} ({kind}) at step {step}", theme=theme)
    targets = {place: _limits(formats, values) for place, values in shown.items()}
    several = len(shown) > 1
    columns = col_wrap or (min(3, len(shown)) if several else 1)
    extra = 15 * max(0, len(formats) - 1)  # one line of text per format
    grid = panel_grid(len(shown), columns, 200 if several else 320, top=56 + extra, gap=70 + extra)
    made = layout(
        theme,
        height=grid.height,
        margin={"l": 52, "r": 16, "t": grid.top, "b": grid.bottom},
        bargap=0,
        showlegend=False,
        hovermode="x",
        annotations=[],
        shapes=[],
        meta={"names": [each for each, _ in shown], "kind": kind, "step": step},
    )
    data = []
    every = {each.dtype: each for own in targets.values() for each in own}
    span = _exponent_range(shown.values(), every.values())
    panels = ExponentPanels(grid, theme_of(theme), span, several, extra, log)
    for number, ((each, own), values) in enumerate(shown.items()):
        mine = targets[each, own]
        trace, highest = _SHAPES[shape](values, mine[0] if len(mine) == 1 else None, panels.colors)
        axes = {"xaxis": axis_id("x", number), "yaxis": axis_id("y", number)}
        data.append({**trace, **axes})
        words = each if several else f"{each} · {own} · step {step:,}"
        words = f"{each} · {own}" if len(by_kind) > 1 else words
        panels.add(made, number, words, highest, values, mine)
        labeled = number == 0 or (len(mine) == 1 and formats == (LOGGED,))
        panels.add_ranges(made, number, mine, labeled)
    made["annotations"] += left_out_note(min(len(places), _MAX_PANELS), len(places), panels.colors)
    return {"data": data, "layout": made}


def _check(over: str | None, shape: str, formats: Sequence[str]) -> None:
    if over not in (None, "steps"):
        raise ValueError(f"over must be 'steps', got {over!r}")
    if shape not in _SHAPES:
        raise ValueError(f"kind must be 'bar', 'line' or 'kde', got {shape!r}")
    if over is not None and len(formats) > 1:
        raise ValueError(f"over={over!r} can show one number format, got {list(formats)}")


class ExponentPanels(NamedTuple):
    """Draws small multiples that share colors, axes and spacing."""

    grid: PanelGrid
    colors: FigureTheme
    span: tuple[int, int]  # exponents
    several: bool
    extra: int  # pixels for further lines of text above a panel
    log: bool

    def add(
        self,
        made: Figure,
        number: int,
        words: str,
        highest: float,
        values: StepExponents,
        formats: Sequence[Limits],
    ) -> None:
        """Add the axes, the title and the facts of a panel to a layout."""
        made[axis_name("x", number)], made[axis_name("y", number)] = _axes(
            self.grid, number, self.span, highest, self.log
        )
        title = {**panel_title(words, self.grid, number, self.colors), "yshift": 18 + self.extra}
        below = _facts(values, formats, self.several, self.colors)
        font = {"size": 11, "color": self.colors.dim}
        made["annotations"] += [
            title,
            {**title, "text": below, "yshift": 2, "font": font, "align": "left"},
        ]

    def add_ranges(
        self, made: Figure, number: int, formats: Sequence[Limits], labeled: bool
    ) -> None:
        """Add the range of one number format as an area, or those of several as lines."""
        x, y = axis_id("x", number), axis_id("y", number)
        if len(formats) == 1:
            made["shapes"] += _range_shapes(formats[0], x, y, self.colors)
            width = (self.span[1] - self.span[0]) * (3 if self.several else 1)
            labels = _range_labels(formats[0], x, y, self.colors, width)
        else:
            lines, labels = _range_lines(formats, x, y, self.colors) if formats else ([], [])
            made["shapes"] += lines
        made["annotations"] += labels if labeled else []


def _listed(name: str | Sequence[str]) -> list[str]:
    return [name] if isinstance(name, str) else list(name)


def format_names(given: Formats) -> tuple[str, ...]:
    """Return the number formats that `dtype_annotation` names; raise for unknown ones.

    >>> format_names(True), format_names("float16"), format_names(None)
    (('logged dtype',), ('float16',), ())
    """
    if given is None or isinstance(given, bool):
        return (LOGGED,) if given else ()
    names = tuple(dict.fromkeys(_listed(given)))
    for name in names:
        if name != LOGGED:
            limits(name)
    return names


def _limits(formats: Iterable[str], values: StepExponents | None) -> list[Limits]:
    """Return the limits of formats; an integer dtype that was logged has none."""
    logged = [] if values is None else [values.dtype]
    names = [each for name in formats for each in (logged if name == LOGGED else [name])]
    return [limits(name) for name in dict.fromkeys(names) if has_limits(name)]


def _axes(
    grid: PanelGrid, number: int, ends: tuple[int, int], highest: float, log: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the axes of a panel, with room for the labels above the highest bar."""
    across, up = grid.domain(number)
    x = {
        "domain": across, "anchor": axis_id("y", number), "range": list(ends), "tick0": 0,
        "nticks": 10 if grid.panels > 1 else 24, **POWERS, **({"matches": "x"} if number else {}),
    }  # fmt: skip
    y = {
        "domain": up, "anchor": axis_id("x", number), "ticksuffix": " %", "nticks": 5,
        **({"type": "log"} if log else {"range": [0, 1.16 * highest or 1.0]}),
    }  # fmt: skip
    return x, y


def _read(table: Table, name: str, kind: str, step: int, rank: int | None) -> StepExponents | None:
    """Return the exponents of a tensor at a step, or None if it was not captured."""
    rows = table.series(kind, name, rank)
    rows = table.without_recomputed(rows[table.step[rows] == step])
    if not len(rows):
        return None

    def total(statistic: str) -> int:
        counts = table.column(statistic)[rows] if table.has(statistic) else np.zeros(1)
        return int(np.nan_to_num(counts).sum())

    each = table.exponents(rows)
    if not each.counts.any() and not total("count"):
        return None
    whole = Exponents(
        each.low,
        each.counts.sum(axis=1, keepdims=True),
        np.fmin.reduce(each.min_abs)[None],
        np.fmax.reduce(each.max_abs)[None],
    )
    infs = total("posinfs") + total("neginfs")
    dtype = table.dtypes[table.dtype[rows[0]]]
    below, above = (int(counts.sum()) for counts in table.outside_range(rows))
    return StepExponents(whole, total("zeros"), total("nans"), infs, dtype, below, above)


def _exponent_range(shown: Iterable[StepExponents], targets: Iterable[Limits]) -> tuple[int, int]:
    """Return a range that covers all exponents, and the formats."""
    ends = [end for target in targets for end in (target.zero - 2, target.top + 3)]
    for values in shown:
        filled = np.flatnonzero(values.exponents.counts.any(axis=1)) + values.exponents.low
        ends += [int(filled[0]) - 1, int(filled[-1]) + 2] if len(filled) else []
    return (min(ends), max(ends)) if ends else (-8, 8)


_Shape = tuple[dict[str, Any], float]  # a trace and its highest value


def _filled(values: StepExponents) -> tuple[list[int], list[int], list[float]]:
    """Return the exponents that occur, with their counts and shares in percent."""
    counts = values.exponents.counts[:, 0]
    filled = np.flatnonzero(counts)
    bins = np.arange(filled[0], filled[-1] + 1) if len(filled) else filled
    exponents = (values.exponents.low + bins).tolist()
    shares = (counts[bins] / max(1, int(counts.sum())) * 100).tolist()
    return exponents, counts[bins].tolist(), shares


def _bars(values: StepExponents, target: Limits | None, colors: FigureTheme) -> _Shape:
    exponents, counts, shares = _filled(values)
    return {
        "type": "bar", "x": exponents, "offset": 0, "width": 1, "y": shares, "customdata": counts,
        "marker": {
            "color": [_fate(n, target, colors) for n in exponents],
            "line": {"width": 0.6, "color": colors.page},
        },
        "hovertemplate": _HOVER.replace("#", "x"),
    }, max(shares, default=0.0)  # fmt: skip


_HOVER = (
    "2<sup>%{#}</sup> ≤ |x| &lt; twice that<br>%{customdata:,} values, %{y:.4~g} %<extra></extra>"
)


def _line(values: StepExponents, target: Limits | None, colors: FigureTheme) -> _Shape:
    """Return one point per power of two, in the middle of its bin."""
    exponents, counts, shares = _filled(values)
    marks = [_fate(n, target, colors) for n in exponents]
    return {
        "type": "scatter", "mode": "lines+markers", "x": [n + 0.5 for n in exponents],
        "y": shares, "customdata": counts, "text": [str(n) for n in exponents],
        "line": {"color": colors.good, "width": 1.6}, "marker": {"size": 5, "color": marks},
        "hovertemplate": _HOVER.replace("#", "text"),
    }, max(shares, default=0.0)  # fmt: skip


def _density(values: StepExponents, target: Limits | None, colors: FigureTheme) -> _Shape:
    """Return the shares smoothed by a Gaussian, in percent per power of two."""
    exponents, _, shares = _filled(values)
    reach = 4 * _FINE // 2  # four bandwidths
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / (_FINE * _BANDWIDTH)) ** 2)
    fine = np.pad(np.repeat(shares, _FINE), reach)
    y = np.convolve(fine, kernel / kernel.sum(), "same") if shares else fine
    x = (exponents[0] if exponents else 0) + (np.arange(len(y)) + 0.5 - reach) / _FINE
    return {
        "type": "scatter", "mode": "lines", "x": typed(x), "y": typed(y), "fill": "tozeroy",
        "line": {"color": colors.good, "width": 1.6},
        "hovertemplate": "2<sup>%{x:.1f}</sup>: %{y:.3~g} % per power of two<extra></extra>",
    }, float(y.max(initial=0.0))  # fmt: skip


_SHAPES = {"bar": _bars, "line": _line, "kde": _density}


def _fate(exponent: int, target: Limits | None, colors: FigureTheme) -> str:
    if target is None:
        return colors.good
    if exponent < target.zero or exponent > target.top:
        return colors.bad
    return colors.fair if exponent < target.normal else colors.good


def _facts(
    values: StepExponents, targets: Sequence[Limits], short: bool, colors: FigureTheme
) -> str:
    """Return what stands below a title: shares that are lost, values without an exponent.

    Several formats have one line each.
    """
    lost = [_lost_shares(values.exponents, target, short, colors) for target in targets]
    words = lost[0] if len(targets) == 1 else []
    counts = (
        (values.below, "below the counted range", colors.bad),
        (values.above, "above the counted range", colors.bad),
        (0 if short and targets else values.zeros, "zero", colors.dim),
        (values.nans, "NaN", colors.nan),
        (values.infs, "Inf", colors.nan),
    )
    words += [_colored(f"{count:,} {word}", color) for count, word, color in counts if count]
    words = words if targets or short else [*words, text(values.dtype)]
    if len(targets) < 2:
        return " · ".join(words)
    if short:  # there is no room for more than what is lost
        lost = [[one for one in each if "subnormal" not in one] or each for each in lost]
    pairs = zip(targets, lost, strict=True)
    lines = [f"{text(target.dtype)}: {' · '.join(shares)}" for target, shares in pairs]
    lines[-1] = " · ".join([lines[-1], *words])
    return "<br>".join(lines)


def _lost_shares(
    exponents: Exponents, target: Limits, short: bool, colors: FigureTheme
) -> list[str]:
    """Return the shares that a format loses; a range where the exponents leave it open."""
    loss = losses(exponents, target)
    total = int(loss.values[0])
    if not total:
        return ["no nonzero values"]
    words = []
    for name, least, most, color in (
        ("underflow", loss.underflow, loss.underflow_at_most, colors.bad),
        ("subnormal", loss.subnormal, loss.subnormal, colors.fair),
        ("overflow", loss.overflow, loss.overflow_at_most, colors.bad),
    ):
        if not most[0] and short:
            continue
        low, high = (share(int(count[0]) / total) for count in (least, most))
        shares = low if low == high else f"{low.removesuffix(' %')}–{high}"
        words.append(_colored(f"{shares} {name}", color if most[0] else colors.dim))
    return words or ["no loss"]


def _colored(words: str, color: str) -> str:
    return f'<span style="color:{color}">{words}</span>'


# -- ranges of number formats -----------------------------------------------------------------


def _range_shapes(target: Limits, x: str, y: str, colors: FigureTheme) -> list[dict[str, Any]]:
    """Return the normal and the subnormal range of a format as bands behind the bars."""
    top = math.log2(target.over)
    place = {"xref": x, "yref": f"{y} domain", "y0": 0, "y1": 1, "layer": "below"}
    bands = ((target.zero, target.normal, colors.fair), (target.normal, top, colors.good))
    ends = ((target.zero, "dot"), (target.normal, "dot"), (top, "solid"))
    return [
        {**place, "type": "rect", "x0": start, "x1": end, "fillcolor": color, "opacity": 0.12,
         "line": {"width": 0}}
        for start, end, color in bands if end > start
    ] + [
        {**place, "type": "line", "x0": at, "x1": at,
         "line": {"width": 1, "color": colors.dim, "dash": dash}}
        for at, dash in ends
    ]  # fmt: skip


def _range_lines(
    targets: Sequence[Limits], x: str, y: str, colors: FigureTheme
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the ends of several formats as lines, a color for each, and their names."""
    lines: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    for place, target in enumerate(targets):
        color, over = colors.lines[(place + 1) % len(colors.lines)], math.log2(target.over)
        lines += [
            {"type": "line", "xref": x, "yref": f"{y} domain", "y0": 0, "y1": 1, "x0": at,
             "x1": at, "line": {"width": 1.4, "color": color, "dash": dash}}
            for at, dash in ((target.zero, "dot"), (target.normal, "dash"), (over, "solid"))
        ]  # fmt: skip
        labels.append({
            "xref": x, "yref": f"{y} domain", "x": over, "xanchor": "right", "y": 1,
            "yanchor": "top", "yshift": -13 * place, "showarrow": False,
            "text": text(target.dtype), "font": {"size": 10, "color": color},
        })  # fmt: skip
    return lines, labels


def _range_labels(
    target: Limits, x: str, y: str, colors: FigureTheme, width: int
) -> list[dict[str, Any]]:
    """Return the name of the format above its range, and ``subnormal`` where it has room."""
    label = {
        "xref": x, "yref": f"{y} domain", "y": 1, "yanchor": "top", "showarrow": False,
        "font": {"size": 10, "color": colors.dim},
    }  # fmt: skip
    middle = (target.normal + math.log2(target.over)) / 2
    words = [{**label, "x": middle, "text": text(target.dtype)}]
    if target.normal - target.zero > 0.08 * width:
        words.append({**label, "x": (target.zero + target.normal) / 2, "text": "subnormal"})
    return words
