"""Traces that several figures are made of, with only as many points and marks as are visible."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.page.encoding import Floats, Integers, typed

_TINY = 100  # cells along a side from which a cell may be smaller than a pixel
_BLOCKS = 48  # blocks along a side in which cells are counted


def line_trace(
    x: NDArray[Any], y: NDArray[np.float64], pixels: int, line: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Return a line over rising `x`, thinned to what so many pixels can show; NaN is a gap."""
    kept = decimate(x, y, pixels)
    return {
        "type": "scatter", "mode": "lines+markers" if len(kept) <= 40 else "lines",
        "x": typed(x[kept]), "y": typed(y[kept]), "line": line, "marker": {"size": 4}, **more,
    }  # fmt: skip


def marks_trace(
    x: Any, y: Any, color: str, *, symbol: str = "x", size: int = 8, edge: str = "", **more: Any
) -> dict[str, Any]:
    """Return single marks; `edge` is the color of a thin line around each."""
    marker: dict[str, Any] = {"symbol": symbol, "size": size, "color": color}
    if edge:
        marker["line"] = {"width": 1, "color": edge}
    x, y = (typed(each) if isinstance(each, np.ndarray) else each for each in (x, y))
    return {"type": "scatter", "mode": "markers", "x": x, "y": y, "marker": marker, **more}


def flat_trace(mask: NDArray[np.bool_], x: Any, y: Any, color: str, **more: Any) -> dict[str, Any]:
    """Return a heatmap that paints the cells of a mask in one color."""
    return {
        "type": "heatmap", "x": x, "y": y, "z": typed(np.where(mask, 1, np.nan).astype("f4")),
        "zmin": 0, "zmax": 1, "colorscale": [[0, color], [1, color]], "showscale": False,
        "hoverongaps": False, **more,
    }  # fmt: skip


def flagged_cells(
    mask: NDArray[np.bool_],
    x: NDArray[Any],
    y: NDArray[Any] | list[str],
    color: str,
    legend: str,
    edge: str,
    **flat: Any,
) -> list[dict[str, Any]]:
    """Return traces that paint cells in a color which the scale lacks, with a legend entry.

    A cell may be smaller than a pixel: lonely ones in a large heatmap also get a mark.
    """
    none = np.empty(0, np.intp)
    rows, columns = lonely_cells(mask) if max(mask.shape) > _TINY else (none, none)
    positions, encoded = (y, y) if isinstance(y, list) else (y.tolist(), typed(y))
    key = marks_trace(
        x[columns].tolist() or [None], [positions[i] for i in rows] or positions[:1], color,
        symbol="square", size=6, edge=edge, name=legend, hoverinfo="skip",
    )  # fmt: skip
    return [flat_trace(mask, typed(x), encoded, color, **flat), key]


def decimate(x: NDArray[np.generic], y: Floats, width: int) -> Integers:
    """Return which points of a line with rising `x` to draw, at most five per pixel.

    Each pixel keeps its first, last, smallest and largest value, and one NaN: a gap in the line.

    >>> import numpy as np
    >>> y = np.zeros(100_000)
    >>> y[31_415] = 7.0
    >>> y[27_182] = np.nan
    >>> kept = decimate(np.arange(100_000), y, 500)
    >>> 31_415 in kept, 27_182 in kept, len(kept) < 2500
    (True, True, True)
    """
    count = len(x)
    if count <= 5 * width:
        return np.arange(count)
    distance = x.astype(np.float64) - float(x[0])
    span = float(distance[-1]) or 1.0
    pixel = np.minimum((distance * (width / span)).astype(np.int64), width - 1)
    new = np.diff(pixel, prepend=-1) != 0
    starts = np.flatnonzero(new)
    number = np.cumsum(new) - 1
    low, high = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
    kept = [_first(mask, number) for mask in (y == low[number], y == high[number], np.isnan(y))]
    return np.unique(np.concatenate([*kept, starts, np.append(starts[1:], count) - 1]))


def _first(chosen: NDArray[np.bool_], number: Integers) -> Integers:
    """Return the first chosen point of each pixel."""
    found = np.flatnonzero(chosen)
    return found[np.unique(number[found], return_index=True)[1]]


def lonely_cells(mask: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return rows and columns of marked cells, one per neighborhood with few of them.

    A browser may not draw a cell that is smaller than a pixel; many cells together are visible.

    >>> import numpy as np
    >>> mask = np.zeros((1000, 1000), bool)
    >>> mask[7, 900] = mask[500:600, :100] = True
    >>> rows, columns = lonely_cells(mask)
    >>> list(zip(rows.tolist(), columns.tolist()))[0], len(rows) < 20
    ((7, 900), True)
    """
    rows, columns = np.nonzero(mask)
    block = (rows * _BLOCKS // len(mask)) * _BLOCKS + columns * _BLOCKS // mask.shape[1]
    _, first, count = np.unique(block, return_index=True, return_counts=True)
    lonely = first[count < 0.3 * mask.size / _BLOCKS**2 + 1]
    return rows[lonely], columns[lonely]
