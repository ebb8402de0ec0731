"""A tensor itself: a matrix as a heatmap, a vector as a line, the values as a histogram."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.page.encoding import Figure, Floats, text, typed
from tensortap.rooms.figures.figures.panels import log_axis, whole_ticks
from tensortap.rooms.figures.figures.theme import (
    LEGEND_RIGHT,
    layout,
    message_figure,
    scale,
    theme_of,
)
from tensortap.rooms.figures.figures.traces import flagged_cells, line_trace, marks_trace
from tensortap.rooms.figures.reals import counts_of, nonempty
from tensortap.stats import summarize_array
from tensortap.stats.conversion import as_real, is_number
from tensortap.text.tensors import number

SIDE = 400  # largest number of tiles along a side
_BARS = 80
_EXACT = 1 << 53  # integers up to here are exact in a browser
_PIXELS = 1200
_MAX_MARKS = 1000
_CHUNK = 1 << 22  # elements that are reduced at once
NAN, POSINF, NEGINF = 1, 2, 4


def tensor_figure(
    array: NDArray[Any],
    *,
    title: str = "",
    origin: tuple[int, int] = (0, 0),
    axes: tuple[str, str] = ("", ""),
    rows: int = SIDE,
    columns: int = SIDE,
    limit: float | None = None,
    theme: str = "light",
) -> Figure:
    """Return a matrix as a heatmap, a vector as a line, a single number as text.

    A large matrix is drawn in tiles: each shows its value farthest from zero, and its smallest and
    largest when hovered. NaN, +Inf and −Inf have their own colors, and one of them is enough to
    color its tile. `origin` is the position of the first element in the whole tensor. `limit` is
    the value of the last color, by default the largest magnitude.
    """
    array = np.asarray(array)
    reason = _why_not(array)
    if reason:
        return message_figure(reason, theme=theme)
    if array.ndim == 0:
        return message_figure(f"{title} = {array.item()}" if title else str(array), theme=theme)
    if array.ndim == 1:
        return _line_figure(array, title, origin[-1], axes[-1], theme)
    if array.ndim > 2:
        raise ValueError(f"a figure has two axes: choose a slice of the shape {array.shape}")
    reduced = tiles(array, rows, columns)
    return _matrix_figure(array, reduced, title, origin, axes, limit, theme)


def histogram_figure(array: NDArray[Any], *, title: str = "", theme: str = "light") -> Figure:
    """Return how many elements have which value; every element is counted."""
    array = np.asarray(array)
    reason = _why_not(array)
    if reason:
        return message_figure(reason, theme=theme)
    colors = theme_of(theme)
    summary = summarize_array(array)
    if not summary.finite:
        return message_figure(f"none of {array.size:,} elements is finite", theme=theme)
    limits = nonempty(summary.min, summary.max)
    counts = counts_of(array, limits, _BARS)
    edges = np.linspace(*limits, _BARS + 1)
    bad = summary.count - summary.finite
    words = f"{array.size:,} elements" + (f", {bad:,} of them not finite" if bad else "")
    bars = {
        "type": "bar",
        "x": ((edges[:-1] + edges[1:]) / 2).tolist(),
        "y": counts.tolist(),
        "width": float(edges[1] - edges[0]),
        "customdata": np.stack([edges[:-1], edges[1:]], -1).tolist(),
        "marker": {"color": colors.good, "line": {"width": 0.6, "color": colors.page}},
        "hovertemplate": "%{customdata[0]:.4~g} to %{customdata[1]:.4~g}<br>%{y:,}<extra></extra>",
    }
    wide = int(counts.max()) > 200 * max(1, int(counts[counts > 0].min()))
    made = layout(
        theme,
        height=280,
        title={"text": _title(title, words, colors.dim)},
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


def _title(title: str, facts: str, color: str) -> str:
    dim = f'<span style="color:{color};font-size:12px">{text(facts)}</span>'
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
    reduced: Tiles,
    title: str,
    origin: tuple[int, int],
    axes: tuple[str, str],
    limit: float | None,
    theme: str,
) -> Figure:
    colors = theme_of(theme)
    size = reduced.height, reduced.width
    tile = f"{reduced.height} × {reduced.width}" if max(size) > 1 else ""
    y, x = (
        origin[axis] + np.arange(reduced.far.shape[axis]) * size[axis] + (size[axis] - 1) / 2
        for axis in (0, 1)
    )
    data = [_tiles_trace(array, reduced, y, x, limit, theme)]
    for flag, color, word in (
        (NEGINF, colors.neginf, "−Inf"), (POSINF, colors.posinf, "+Inf"), (NAN, colors.nan, "NaN")
    ):  # fmt: skip
        mask = (reduced.flags & flag) > 0
        if mask.any():
            near = f"in {tile} elements around " if tile else ""
            data += flagged_cells(
                mask, x, y, color, word, colors.page, name=word,
                hovertemplate=f"{near}[%{{y}}, %{{x}}]: <b>{word}</b><extra></extra>",
            )  # fmt: skip
    height, width = array.shape
    facts = f"{height:,} × {width:,} {array.dtype}" + (f", tiles of {tile}" if tile else "")
    ends = [[start - 0.5, start + n - 0.5] for start, n in zip(origin, array.shape, strict=True)]
    plain = {"showgrid": False, "zeroline": False, "ticks": ""}
    made = layout(
        theme,
        height=110 + round(min(480.0, max(120.0, 640 * height / width))),
        title={"text": _title(title, facts, colors.dim)},
        xaxis={**plain, "title": {"text": text(axes[1])}, **whole_ticks(width), "range": ends[1]},
        yaxis={
            **plain, "title": {"text": text(axes[0])}, **whole_ticks(height),
            "range": ends[0][::-1],
        },
        showlegend=len(data) > 1,
        legend=LEGEND_RIGHT,
        meta={"tile": list(size), "reduced": max(size) > 1},
    )  # fmt: skip
    return {"data": data, "layout": made}


def _tiles_trace(
    array: NDArray[Any],
    reduced: Tiles,
    y: NDArray[Any],
    x: NDArray[Any],
    limit: float | None,
    theme: str,
) -> dict[str, Any]:
    far = reduced.far
    good = far[np.isfinite(far)]
    signed = bool(good.size) and float(np.nanmin(reduced.low)) < 0
    high = limit or float(np.abs(good).max(initial=0.0)) or 1.0
    if array.dtype.itemsize <= 4 and array.dtype.kind not in "iu":
        far = far.astype(np.float32)
    colors = theme_of(theme)
    trace: dict[str, Any] = {
        "type": "heatmap", "x": typed(x), "y": typed(y), "z": typed(far),
        "zmin": -high if signed else 0.0, "zmax": high,
        "colorscale": scale(colors.sign if signed else colors.size), "hoverongaps": False,
        "hovertemplate": f"[%{{y}}, %{{x}}] = <b>%{{z:{_digits(array)}}}</b><extra></extra>",
        "colorbar": {"exponentformat": "power", "nticks": 7, "len": 1, "y": 0.5},
    }  # fmt: skip
    if max(reduced.height, reduced.width) > 1:
        starts = y - (reduced.height - 1) / 2, x - (reduced.width - 1) / 2
        exact = far.dtype if max(y[-1], x[-1]) < 1 << 24 else np.float64
        custom = np.stack([reduced.low, reduced.high, *np.meshgrid(*starts, indexing="ij")], -1)
        trace["customdata"] = typed(custom.astype(exact))
        trace["hovertemplate"] = (
            f"{reduced.height} × {reduced.width} elements from "
            "[%{customdata[2]:d}, %{customdata[3]:d}] on:<br><b>%{customdata[0]:.6~g}</b> to "
            "<b>%{customdata[1]:.6~g}</b><extra></extra>"
        )
    elif array.dtype.kind in "iu" and high > _EXACT:
        trace["text"] = [[str(cell) for cell in row] for row in array.tolist()]
        trace["hovertemplate"] = "[%{y}, %{x}] = <b>%{text}</b><extra></extra>"
    return trace


def _line_figure(array: NDArray[Any], title: str, origin: int, axis: str, theme: str) -> Figure:
    colors = theme_of(theme)
    value = as_real(array)
    index = origin + np.arange(len(value))
    finite = np.isfinite(value)
    data = [line_trace(
        index, np.where(finite, value, np.nan), _PIXELS, {"color": colors.lines[0], "width": 1.2},
        name=text(title), showlegend=False,
        hovertemplate=f"[%{{x}}] = <b>%{{y:{_digits(array)}}}</b><extra></extra>",
    )]  # fmt: skip
    facts = f"{len(value):,} {array.dtype}"
    low = 0.0
    if finite.any():
        low, high = float(value[finite].min()), float(value[finite].max())
        facts += f", from {number(low, 4)} to {number(high, 4)}"
    for mask, color, word in (
        (np.isnan(value), colors.nan, "NaN"),
        (value == np.inf, colors.posinf, "+Inf"),
        (value == -np.inf, colors.neginf, "−Inf"),
    ):
        at = np.flatnonzero(mask)
        if len(at):
            few = at[:: max(1, len(at) // _MAX_MARKS)]
            data.append(marks_trace(
                index[few], np.full(len(few), low), color, name=f"{len(at):,} {word}",
                hovertemplate=f"[%{{x}}]: <b>{word}</b><extra></extra>",
            ))  # fmt: skip
    made = layout(
        theme,
        height=280,
        title={"text": _title(title, facts, colors.dim)},
        xaxis={"title": {"text": text(axis)}, **whole_ticks(len(value))},
        yaxis={"exponentformat": "power"},
        showlegend=len(data) > 1,
        legend=LEGEND_RIGHT,
    )
    return {"data": data, "layout": made}


class Tiles(NamedTuple):
    """The smallest and largest finite value of each tile, and flags for NaN and infinities."""

    low: Floats
    high: Floats
    flags: NDArray[np.uint8]
    height: int  # rows of the matrix in a tile
    width: int

    @property
    def far(self) -> Floats:
        """Return the values farthest from zero; NaN where none is finite."""
        return np.where(-self.low > self.high, self.low, self.high)


def tiles(matrix: NDArray[Any], rows: int, columns: int) -> Tiles:
    """Reduce a matrix to at most so many rows and columns of tiles.

    >>> import numpy as np
    >>> whole = np.zeros((4, 4), "float32")
    >>> whole[1, 2] = np.nan
    >>> whole[3, 0] = -5
    >>> reduced = tiles(whole, 2, 2)
    >>> reduced.low.tolist(), reduced.flags.tolist()
    ([[0.0, 0.0], [-5.0, 0.0]], [[0, 1], [0, 0]])
    """
    height, width = math.ceil(matrix.shape[0] / rows), math.ceil(matrix.shape[1] / columns)
    down, across = math.ceil(matrix.shape[0] / height), math.ceil(matrix.shape[1] / width)
    low, high = np.empty((down, across)), np.empty((down, across))
    flags = np.zeros((down, across), np.uint8)
    starts = np.arange(0, matrix.shape[1], width)

    def reduced(ufunc: np.ufunc, values: NDArray[Any]) -> NDArray[Any]:
        by_row = ufunc.reduceat(values, np.arange(0, len(values), height))
        return np.asarray(ufunc.reduceat(by_row, starts, axis=1))

    together = max(1, _CHUNK // (height * matrix.shape[1]))
    for first in range(0, down, together):
        part = slice(first, first + together)
        block = as_real(matrix[first * height : (first + together) * height])
        finite = np.isfinite(block)
        if not finite.all():
            masks = (NAN, np.isnan(block)), (POSINF, block == np.inf), (NEGINF, block == -np.inf)
            for flag, mask in masks:
                flags[part] |= np.uint8(flag) * reduced(np.logical_or, mask)
            block = np.where(finite, block, np.nan)
        low[part], high[part] = reduced(np.fmin, block), reduced(np.fmax, block)
    return Tiles(low, high, flags, height, width)
