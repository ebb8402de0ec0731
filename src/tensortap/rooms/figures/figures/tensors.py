"""A tensor itself: a matrix as a heatmap, a vector as a line, the values as a histogram."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.page.encoding import typed
from tensortap.rooms.figures.figures.parts import (
    FLAT_AXIS,
    flagged_cells,
    line_trace,
    log_axis,
    marks_trace,
    whole_ticks,
)
from tensortap.rooms.figures.figures.theme import (
    COLORS,
    LEGEND_RIGHT,
    Figure,
    layout,
    message_figure,
    scale,
    text,
)
from tensortap.rooms.figures.reals import counts_of, edges, nonempty, shrink
from tensortap.stats import summarize_array
from tensortap.stats.conversion import as_real, is_number
from tensortap.text.tensors import number

_SIDE = 400  # largest number of tiles along a side
_BARS = 80
_EXACT = 1 << 53  # integers up to here are exact in a browser
_MAX_MARKS = 1000


def tensor_figure(
    array: NDArray[Any],
    *,
    title: str = "",
    origin: tuple[int, int] = (0, 0),
    axes: tuple[str, str] = ("", ""),
    limit: float | None = None,
) -> Figure:
    """Return a matrix as a heatmap, a vector as a line, a single number as text.

    A large matrix is drawn in tiles: each shows its value farthest from zero. NaN, +Inf and −Inf
    have their own colors, and one of them is enough to color its tile. `origin` is the position of
    the first element in the whole tensor. `limit` is the value of the last color, by default the
    largest magnitude.
    """
    array = np.asarray(array)
    reason = _why_not(array)
    if reason:
        return message_figure(reason)
    if array.ndim == 0:
        return message_figure(f"{title} = {array.item()}" if title else str(array))
    if array.ndim == 1:
        return _line_figure(array, title, origin[-1], axes[-1])
    if array.ndim > 2:
        raise ValueError(f"a figure has two axes: choose a slice of the shape {array.shape}")
    return _matrix_figure(array, title, origin, axes, limit)


def histogram_figure(array: NDArray[Any], *, title: str = "") -> Figure:
    """Return how many elements have which value; every element is counted."""
    array = np.asarray(array)
    reason = _why_not(array)
    if reason:
        return message_figure(reason)
    summary = summarize_array(array)
    if not summary.finite:
        return message_figure(f"none of {array.size:,} elements is finite")
    limits = nonempty(summary.min, summary.max)
    counts = counts_of(array, limits, _BARS)
    ends = np.linspace(*limits, _BARS + 1)
    bad = summary.count - summary.finite
    words = f"{array.size:,} elements" + (f", {bad:,} of them not finite" if bad else "")
    bars = {
        "type": "bar",
        "x": ((ends[:-1] + ends[1:]) / 2).tolist(),
        "y": counts.tolist(),
        "width": float(ends[1] - ends[0]),
        "customdata": np.stack([ends[:-1], ends[1:]], -1).tolist(),
        "marker": {"color": COLORS.good, "line": {"width": 0.6, "color": COLORS.page}},
        "hovertemplate": "%{customdata[0]:.4~g} to %{customdata[1]:.4~g}<br>%{y:,}<extra></extra>",
    }
    wide = int(counts.max()) > 200 * max(1, int(counts[counts > 0].min()))
    made = layout(
        height=280,
        title={"text": _title(title, words)},
        bargap=0,
        xaxis={"showgrid": False},
        yaxis=log_axis(counts.astype(np.float64), 4) if wide else {"nticks": 6},
        showlegend=False,
    )
    return {"data": [bars], "layout": made}


def _why_not(array: NDArray[Any]) -> str:
    """Return why an array cannot be drawn, or an empty text."""
    if not is_number(array.dtype):
        return f"no figure: {array.dtype} does not hold numbers"
    return "" if array.size else f"no elements: the shape is {array.shape}"


def _title(title: str, facts: str) -> str:
    dim = f'<span style="color:{COLORS.dim};font-size:12px">{text(facts)}</span>'
    return f"{text(title)}  {dim}" if title else dim


def _digits(array: NDArray[Any]) -> str:
    """Return a format with enough digits to tell all values of a dtype apart."""
    if array.dtype.kind in "biu":
        return ",d" if array.dtype.kind != "b" else "d"
    if array.dtype.name in ("float64", "complex128", "longdouble"):
        return ".16~g"
    return ".9~g" if array.dtype.itemsize >= 4 else ".5~g"


def _matrix_figure(
    array: NDArray[Any],
    title: str,
    origin: tuple[int, int],
    axes: tuple[str, str],
    limit: float | None,
) -> Figure:
    cells = shrink(array, _SIDE, _SIDE, 0.0)
    size = [-(-whole // tiles) for whole, tiles in zip(array.shape, cells.shape, strict=True)]
    tile = f"{size[0]} × {size[1]}" if max(size) > 1 else ""
    bounds = (edges(whole, tiles) for whole, tiles in zip(array.shape, cells.shape, strict=True))
    y, x = (
        start + (ends[:-1] + ends[1:] - 1) / 2 for start, ends in zip(origin, bounds, strict=True)
    )
    where = f"extreme of up to {tile} elements around " if tile else ""
    data = [_cells_trace(array, cells, y, x, limit, where)]
    for mask, color, word in (
        (cells == -np.inf, COLORS.neginf, "−Inf"), (cells == np.inf, COLORS.posinf, "+Inf"),
        (np.isnan(cells), COLORS.nan, "NaN"),
    ):  # fmt: skip
        if mask.any():
            data += flagged_cells(
                mask, x, y, color, word, name=word,
                hovertemplate=f"{where}[%{{y}}, %{{x}}]: <b>{word}</b><extra></extra>",
            )  # fmt: skip
    height, width = array.shape
    facts = f"{height:,} × {width:,} {array.dtype}" + (f", tiles of {tile}" if tile else "")
    ends = [[start - 0.5, start + n - 0.5] for start, n in zip(origin, array.shape, strict=True)]
    plain = {**FLAT_AXIS, "ticks": ""}
    made = layout(
        height=110 + round(min(480.0, max(120.0, 640 * height / width))),
        title={"text": _title(title, facts)},
        xaxis={**plain, "title": {"text": text(axes[1])}, **whole_ticks(width), "range": ends[1]},
        yaxis={
            **plain, "title": {"text": text(axes[0])}, **whole_ticks(height),
            "range": ends[0][::-1],
        },
        showlegend=len(data) > 1,
        legend=LEGEND_RIGHT,
        meta={"tile": size},
    )  # fmt: skip
    return {"data": data, "layout": made}


def _cells_trace(
    array: NDArray[Any],
    cells: NDArray[Any],
    y: NDArray[Any],
    x: NDArray[Any],
    limit: float | None,
    where: str,
) -> dict[str, Any]:
    good = cells[np.isfinite(cells)]
    signed = bool((good < 0).any())
    high = limit or float(np.abs(good).max(initial=0.0)) or 1.0
    trace: dict[str, Any] = {
        "type": "heatmap", "x": typed(x), "y": typed(y),
        "z": typed(np.where(np.isfinite(cells), cells, np.nan)),
        "zmin": -high if signed else 0.0, "zmax": high,
        "colorscale": scale(COLORS.sign if signed else COLORS.size), "hoverongaps": False,
        "hovertemplate": f"{where}[%{{y}}, %{{x}}] = <b>%{{z:{_digits(array)}}}</b><extra></extra>",
        "colorbar": {"exponentformat": "power", "nticks": 7, "len": 1, "y": 0.5},
    }  # fmt: skip
    if not where and array.dtype.kind in "iu" and high > _EXACT:
        trace["text"] = [[str(cell) for cell in row] for row in array.tolist()]
        trace["hovertemplate"] = "[%{y}, %{x}] = <b>%{text}</b><extra></extra>"
    return trace


def _line_figure(array: NDArray[Any], title: str, origin: int, axis: str) -> Figure:
    value = as_real(array)
    index = origin + np.arange(len(value))
    finite = np.isfinite(value)
    data = [line_trace(
        index, np.where(finite, value, np.nan), 1200, line={"color": COLORS.lines[0], "width": 1.2},
        name=text(title), showlegend=False,
        hovertemplate=f"[%{{x}}] = <b>%{{y:{_digits(array)}}}</b><extra></extra>",
    )]  # fmt: skip
    facts = f"{len(value):,} {array.dtype}"
    low = 0.0
    if finite.any():
        low, high = float(value[finite].min()), float(value[finite].max())
        facts += f", from {number(low, 4)} to {number(high, 4)}"
    for mask, color, word in (
        (np.isnan(value), COLORS.nan, "NaN"),
        (value == np.inf, COLORS.posinf, "+Inf"),
        (value == -np.inf, COLORS.neginf, "−Inf"),
    ):
        at = np.flatnonzero(mask)
        if len(at):
            few = at[:: max(1, len(at) // _MAX_MARKS)]
            data.append(marks_trace(
                index[few], np.full(len(few), low), color, name=f"{len(at):,} {word}",
                hovertemplate=f"[%{{x}}]: <b>{word}</b><extra></extra>",
            ))  # fmt: skip
    made = layout(
        height=280,
        title={"text": _title(title, facts)},
        xaxis={"title": {"text": text(axis)}, **whole_ticks(len(value))},
        yaxis={"exponentformat": "power"},
        showlegend=len(data) > 1,
        legend=LEGEND_RIGHT,
    )
    return {"data": data, "layout": made}
