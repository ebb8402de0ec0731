"""A tensor itself: a slice of it as a heatmap, a line, a histogram, and the difference of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.stats.values import check, real
from tensortap.viz.figures.decimate import decimate
from tensortap.viz.figures.panels import log_axis
from tensortap.viz.figures.theme import (
    Figure,
    layout,
    message_figure,
    number,
    scale,
    text,
    theme_of,
    typed,
    whole_ticks,
)
from tensortap.viz.figures.tiles import NAN, NEGINF, POSINF, Tiles, beacons, tiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIDE = 400  # tiles of a side at most
_BARS = 80
_AT_ONCE = 1 << 22
_TINY = 100  # cells of a side from which on one may be too small to see
_EXACT = 1 << 53  # whole numbers up to here are exact in a browser


def tensor_figure(
    array: NDArray[Any],
    *,
    title: str = "",
    origin: tuple[int, int] = (0, 0),
    axes: Sequence[str] = ("", ""),
    rows: int = SIDE,
    columns: int = SIDE,
    limit: float | None = None,
    theme: str = "light",
) -> Figure:
    """A matrix as a heatmap, a vector as a line, a single number as words.

    Of a large matrix each tile is the value farthest from zero, and hovering tells its least and
    its greatest; NaN, +Inf and −Inf have colours of their own, and one of them is enough to
    colour its tile. `origin` is the place of the first element in the whole tensor. `limit` is
    the value of the last colour, by default the farthest from zero.
    """
    array = np.asarray(array)
    words = _cannot(array)
    if words:
        return message_figure(words, theme=theme)
    if array.ndim == 0:
        value = array.item()
        return message_figure(f"{title}{' = ' if title else ''}{value}", theme=theme)
    if array.ndim == 1:
        return _line(array, title, origin[-1], axes[-1] if axes else "", theme)
    if array.ndim > 2:
        raise ValueError(f"a figure has two axes: choose a slice of the shape {array.shape}")
    found = tiles(array, rows, columns)
    return _heatmap(array, found, title, origin, axes, limit, theme)


def difference_figure(
    a: NDArray[Any], b: NDArray[Any], *, title: str = "", theme: str = "light", **options: Any
) -> Figure:
    """``a - b``, as `tensor_figure` draws it; where both are not finite in the same way it is 0."""
    a, b = np.asarray(a), np.asarray(b)
    words = _cannot(a) or _cannot(b)
    if not words and a.shape != b.shape:
        words = f"no difference: the shapes are {a.shape} and {b.shape}"
    if words:
        return message_figure(words, theme=theme)
    one, other = real(a), real(b)
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.asarray(one - other)
    found[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    return tensor_figure(found, title=title, theme=theme, **options)


def histogram_figure(
    array: NDArray[Any], *, title: str = "", bars: int = _BARS, theme: str = "light"
) -> Figure:
    """How many elements have which value, all of them counted; a logarithmic axis shows few."""
    array = np.asarray(array)
    words = _cannot(array)
    if words:
        return message_figure(words, theme=theme)
    look = theme_of(theme)
    flat = array.reshape(-1)
    chunks = [flat[i : i + _AT_ONCE] for i in range(0, flat.size, _AT_ONCE)]
    low, high, bad = np.inf, -np.inf, 0
    for chunk in chunks:
        values = real(chunk)
        good = values[np.isfinite(values)]
        bad += values.size - good.size
        if good.size:
            low, high = min(low, float(good.min())), max(high, float(good.max()))
    if low > high:
        return message_figure(f"none of {array.size:,} elements is finite", theme=theme)
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = np.zeros(bars, np.int64)
    edges = np.linspace(low, high, bars + 1)
    for chunk in chunks:
        values = real(chunk)
        counts += np.histogram(values[np.isfinite(values)], edges)[0]
    said = f"{array.size:,} elements" + (f", {bad:,} of them not finite" if bad else "")
    data = {
        "type": "bar",
        "x": ((edges[:-1] + edges[1:]) / 2).tolist(),
        "y": counts.tolist(),
        "width": float(edges[1] - edges[0]),
        "customdata": np.stack([edges[:-1], edges[1:]], -1).tolist(),
        "marker": {"color": look.good, "line": {"width": 0.6, "color": look.page}},
        "hovertemplate": "%{customdata[0]:.4~g} to %{customdata[1]:.4~g}<br>%{y:,}<extra></extra>",
    }
    wide = int(counts.max()) > 200 * max(1, int(counts[counts > 0].min()))
    made = layout(
        theme,
        height=280,
        margin={"l": 56, "r": 16, "t": 44, "b": 40},
        title={"text": _titled(title, said, look.dim)},
        bargap=0,
        xaxis={"showgrid": False},
        yaxis=log_axis(counts.astype(np.float64), 4) if wide else {"nticks": 6},
        showlegend=False,
    )
    return {"data": [data], "layout": made}


def _titled(title: str, said: str, colour: str) -> str:
    dim = f'<span style="color:{colour};font-size:12px">{text(said)}</span>'
    return f"{text(title)}  {dim}" if title else dim


def _cannot(array: NDArray[Any]) -> str:
    """Why nothing can be drawn, or nothing."""
    try:
        check(array.dtype)
    except TypeError:
        return f"no figure of {array.dtype}: it does not hold numbers"
    if not array.size:
        return f"no elements: the shape is {array.shape}"
    return ""


def _digits(array: NDArray[Any]) -> str:
    """As many digits as tell every value of a dtype apart."""
    if array.dtype.kind in "biu":
        return ",d" if array.dtype.kind != "b" else "d"
    if array.dtype.name in ("float64", "complex128", "longdouble"):
        return ".16~g"
    return ".9~g" if array.dtype.itemsize >= 4 else ".5~g"


def _heatmap(
    array: NDArray[Any],
    found: Tiles,
    title: str,
    origin: tuple[int, int],
    axes: Sequence[str],
    limit: float | None,
    theme: str,
) -> Figure:
    look = theme_of(theme)
    reduced = found.height > 1 or found.width > 1
    far = found.far
    good = far[np.isfinite(far)]
    largest = float(np.abs(good).max()) if good.size else 1.0
    signed = bool(good.size) and float(found.low[np.isfinite(found.low)].min()) < 0
    high = limit or largest or 1.0
    lowest = -high if signed else 0.0
    x = origin[1] + np.arange(far.shape[1]) * found.width + (found.width - 1) / 2
    y = origin[0] + np.arange(far.shape[0]) * found.height + (found.height - 1) / 2
    small = array.dtype.itemsize <= 4 and array.dtype.kind not in "iu"
    z = far.astype(np.float32) if small else far
    where = "[%{y}, %{x}]"
    digits = _digits(array)
    base: dict[str, Any] = {
        "type": "heatmap", "x": typed(x), "y": typed(y), "z": typed(z), "zmin": lowest,
        "zmax": high, "colorscale": scale(look.sign if signed else look.size),
        "hoverongaps": False, "hovertemplate": f"{where} = <b>%{{z:{digits}}}</b><extra></extra>",
        "colorbar": {"exponentformat": "power", "nticks": 7, "len": 1, "y": 0.5},
    }  # fmt: skip
    if reduced:
        down, across = np.meshgrid(
            origin[0] + np.arange(far.shape[0]) * found.height,
            origin[1] + np.arange(far.shape[1]) * found.width,
            indexing="ij",
        )
        custom = np.stack([found.low, found.high, down, across], -1)
        exact = z.dtype if max(down.max(), across.max()) < 1 << 24 else np.float64
        base["customdata"] = typed(custom.astype(exact))
        base["hovertemplate"] = (
            f"{found.height} × {found.width} elements from "
            "[%{customdata[2]:d}, %{customdata[3]:d}] on:<br><b>%{customdata[0]:.6~g}</b> to "
            "<b>%{customdata[1]:.6~g}</b><extra></extra>"
        )
    elif array.dtype.kind in "iu" and high > _EXACT:
        base["text"] = [[str(cell) for cell in row] for row in array.tolist()]
        base["hovertemplate"] = f"{where} = <b>%{{text}}</b><extra></extra>"
    data = [base]
    for flag, colour, word in (
        (NEGINF, look.neginf, "−Inf"), (POSINF, look.posinf, "+Inf"), (NAN, look.nan, "NaN")
    ):  # fmt: skip
        mine = (found.flags & flag) > 0
        if mine.any():
            near = f"in {found.height} × {found.width} elements around " if reduced else ""
            data.append({
                "type": "heatmap", "x": base["x"], "y": base["y"], "name": word,
                "z": typed(np.where(mine, 1.0, np.nan).astype(np.float32)), "zmin": 0, "zmax": 1,
                "colorscale": [[0, colour], [1, colour]], "showscale": False,
                "hoverongaps": False, "hovertemplate": f"{near}{where}: <b>{word}</b>"
                "<extra></extra>",
            })  # fmt: skip
            down, across = beacons(mine)
            tiny = max(far.shape) > _TINY
            data.append({
                "type": "scatter", "mode": "markers", "name": word, "hoverinfo": "skip",
                "x": typed(x[across]) if tiny else [None], "y": typed(y[down]) if tiny else [None],
                "marker": {
                    "symbol": "square", "size": 6, "color": colour,
                    "line": {"width": 1, "color": look.page},
                },
            })  # fmt: skip
    tall = array.shape[0] / array.shape[1]
    axis = {"showgrid": False, "zeroline": False, "ticks": ""}
    made = layout(
        theme,
        height=110 + round(min(480.0, max(120.0, 640 * tall))),
        margin={"l": 48, "r": 16, "t": 44, "b": 40},
        title={"text": _titled(title, _about(array, found, reduced), look.dim)},
        xaxis={
            **axis, "title": {"text": text(axes[1])}, **whole_ticks(array.shape[1]),
            "range": [origin[1] - 0.5, origin[1] + array.shape[1] - 0.5],
        },
        yaxis={
            **axis, "title": {"text": text(axes[0])}, **whole_ticks(array.shape[0]),
            "range": [origin[0] + array.shape[0] - 0.5, origin[0] - 0.5],
        },
        hovermode="closest",
        showlegend=len(data) > 1,  # of one entry plotly would show none
        legend={"x": 1, "xanchor": "right"},
        meta={"reduced": reduced, "tile": [found.height, found.width], "shape": list(array.shape)},
    )  # fmt: skip
    return {"data": data, "layout": made}


def _about(array: NDArray[Any], found: Tiles, reduced: bool) -> str:
    size = " × ".join(f"{n:,}" for n in array.shape)
    return f"{size} {array.dtype}" + (
        f", tiles of {found.height} × {found.width}" if reduced else ""
    )


def _line(array: NDArray[Any], title: str, origin: int, axis: str, theme: str) -> Figure:
    look = theme_of(theme)
    value = real(array)
    index = origin + np.arange(len(value))
    drawn = np.where(np.isfinite(value), value, np.nan)
    kept = decimate(index, drawn, 1200)
    data: list[dict[str, Any]] = [{
        "type": "scatter", "mode": "lines+markers" if len(kept) <= 60 else "lines",
        "x": typed(index[kept]), "y": typed(drawn[kept]),
        "line": {"color": look.lines[0], "width": 1.2}, "marker": {"size": 5},
        "name": text(title), "showlegend": False,
        "hovertemplate": f"[%{{x}}] = <b>%{{y:{_digits(array)}}}</b><extra></extra>",
    }]  # fmt: skip
    good = drawn[~np.isnan(drawn)]
    level = float(good.min()) if good.size else 0.0
    for mine, colour, word in (
        (np.isnan(value), look.nan, "NaN"),
        (value == np.inf, look.posinf, "+Inf"),
        (value == -np.inf, look.neginf, "−Inf"),
    ):
        at = np.flatnonzero(mine)
        if len(at):
            few = at[:: max(1, len(at) // 1000)]
            data.append({
                "type": "scatter", "mode": "markers", "name": f"{len(at):,} {word}",
                "x": typed(index[few]), "y": typed(np.full(len(few), level)),
                "marker": {"symbol": "x", "size": 8, "color": colour},
                "hovertemplate": f"[%{{x}}]: <b>{word}</b><extra></extra>",
            })  # fmt: skip
    said = f"{len(value):,} {array.dtype}" + (
        f", from {number(float(good.min()))} to {number(float(good.max()))}" if good.size else ""
    )
    made = layout(
        theme,
        height=280,
        margin={"l": 56, "r": 16, "t": 44, "b": 40},
        title={"text": _titled(title, said, look.dim)},
        xaxis={"title": {"text": text(axis)}, **whole_ticks(len(value))},
        yaxis={"exponentformat": "power"},
        hovermode="closest",
        showlegend=len(data) > 1,
        legend={"x": 1, "xanchor": "right"},
        meta={"reduced": len(kept) < len(value), "shape": list(array.shape)},
    )
    return {"data": data, "layout": made}
