"""Exponent histograms at one step, with the range of a number format drawn over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensortap.stats.formats import Exponents, Limits, limits, losses
from tensortap.table.table import Table, locked
from tensortap.viz.figures.encoding import Figure, share, some_names, text
from tensortap.viz.figures.exponent_history import (
    POWERS,
    range_labels,
    range_shapes,
    ridge_figure,
    steps_figure,
)
from tensortap.viz.figures.panels import (
    PanelGrid,
    axis_id,
    axis_name,
    left_out_note,
    panel_grid,
    panel_title,
)
from tensortap.viz.figures.theme import FigureTheme, layout, message_figure, theme_of

_MAX_PANELS = 48


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
    """Return how the values of tensors are spread over powers of two at a step.

    `dtype_annotation` draws the range of a number format, with the shares that it would lose.
    Several names become small multiples. ``over="steps"`` shows all steps as a heatmap,
    ``over="ridge"`` as curves one behind the other.
    """
    names = [name] if isinstance(name, str) else list(name)
    target = None if dtype_annotation is None else limits(dtype_annotation)
    if over not in (None, "steps", "ridge"):
        raise ValueError(f"over must be 'steps' or 'ridge', got {over!r}")
    if over is not None:
        draw = steps_figure if over == "steps" else ridge_figure
        return draw(table, names[0], kind, step, rank, target, theme)
    read = ((each, _read(table, each, kind, step, rank)) for each in names[:_MAX_PANELS])
    shown = {each: values for each, values in read if values is not None}
    if not shown:
        words = f"no exponents of {some_names(names)} ({kind}) at step {step}"
        return message_figure(words, theme=theme)
    colors = theme_of(theme)
    several = len(shown) > 1
    columns = col_wrap or (min(3, len(shown)) if several else 1)
    grid = panel_grid(len(shown), columns, 200 if several else 320, top=56, gap=70)
    made = layout(
        theme,
        height=grid.height,
        margin={"l": 52, "r": 16, "t": grid.top, "b": grid.bottom},
        bargap=0,
        showlegend=False,
        hovermode="x",
        annotations=[],
        shapes=[],
        meta={"names": list(shown), "kind": kind, "step": step},
    )
    data = []
    low, high = _exponent_range(shown.values(), target)
    for number, (each, values) in enumerate(shown.items()):
        x, y = axis_id("x", number), axis_id("y", number)
        data.append(_bars(values, target, x, y, colors))
        made[axis_name("x", number)], made[axis_name("y", number)] = _axes(
            grid, number, (low, high), max(data[-1]["y"], default=0.0), log
        )
        words = each if several else f"{each} · {kind} · step {step:,}"
        title = {**panel_title(words, grid, number, colors), "yshift": 18}
        below = " · ".join(_facts(values, target, several, colors))
        font = {"size": 11, "color": colors.dim}
        made["annotations"] += [title, {**title, "text": below, "yshift": 2, "font": font}]
        if target is not None:
            made["shapes"] += range_shapes(target, x, y, colors)
            if number == 0:
                width = (high - low) * (3 if several else 1)
                made["annotations"] += range_labels(target, x, y, colors, width)
    made["annotations"] += left_out_note(min(len(names), _MAX_PANELS), len(names), colors)
    return {"data": data, "layout": made}


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


def _exponent_range(shown: Iterable[StepExponents], target: Limits | None) -> tuple[int, int]:
    """Return a range that covers all exponents, and the format."""
    ends = [] if target is None else [target.zero - 2, target.top + 3]
    for values in shown:
        filled = np.flatnonzero(values.exponents.counts.any(axis=1)) + values.exponents.low
        ends += [int(filled[0]) - 1, int(filled[-1]) + 2] if len(filled) else []
    return (min(ends), max(ends)) if ends else (-8, 8)


def _bars(
    values: StepExponents, target: Limits | None, x: str, y: str, colors: FigureTheme
) -> dict[str, Any]:
    counts = values.exponents.counts[:, 0]
    filled = np.flatnonzero(counts)
    bins = np.arange(filled[0], filled[-1] + 1) if len(filled) else filled
    exponents = (values.exponents.low + bins).tolist()
    return {
        "type": "bar", "x": exponents, "offset": 0, "width": 1, "xaxis": x, "yaxis": y,
        "y": (counts[bins] / max(1, int(counts.sum())) * 100).tolist(),
        "customdata": counts[bins].tolist(),
        "marker": {
            "color": [_fate(n, target, colors) for n in exponents],
            "line": {"width": 0.6, "color": colors.page},
        },
        "hovertemplate": "2<sup>%{x}</sup> ≤ |x| &lt; twice that<br>%{customdata:,} values, "
        "%{y:.4~g} %<extra></extra>",
    }  # fmt: skip


def _fate(exponent: int, target: Limits | None, colors: FigureTheme) -> str:
    if target is None:
        return colors.good
    if exponent < target.zero or exponent > target.top:
        return colors.bad
    return colors.fair if exponent < target.normal else colors.good


def _facts(
    values: StepExponents, target: Limits | None, short: bool, colors: FigureTheme
) -> list[str]:
    """Return what stands below a title: shares that are lost, values without an exponent."""
    words = [] if target is None else _lost_shares(values.exponents, target, short, colors)
    counts = (
        (values.below, "below the counted range", colors.bad),
        (values.above, "above the counted range", colors.bad),
        (0 if short and target else values.zeros, "zero", colors.dim),
        (values.nans, "NaN", colors.nan),
        (values.infs, "Inf", colors.nan),
    )
    words += [_colored(f"{count:,} {word}", color) for count, word, color in counts if count]
    return words if target or short else [*words, text(values.dtype)]


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
