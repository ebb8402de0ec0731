"""Parts of figures: panels, axes, and traces with only as many points as are visible."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.page.encoding import typed
from tensortap.rooms.figures.figures.theme import COLORS, Floats, Integers, note, text

_TINY = 100  # cells along a side from which a cell may be smaller than a pixel
_BLOCKS = 48  # blocks along a side in which cells are counted
FLAT_AXIS = {"showgrid": False, "zeroline": False}


class PanelGrid(NamedTuple):
    """Panels in rows and columns; panel `n` has the axes ``x{column}`` and ``y{n}``."""

    panels: int
    columns: int
    height: int  # of the figure
    top: int
    bottom: int
    gap: int  # pixels between two rows, for labels and the next title

    def domain(self, number: int) -> tuple[list[float], list[float]]:
        """Return the shares of the width and of the height that a panel covers."""
        row, column = divmod(number, self.columns)
        rows = math.ceil(self.panels / self.columns)
        gap = self.gap / max(1, self.height - self.top - self.bottom)
        high = max((1 - gap * (rows - 1)) / rows, 0.01)
        upper = 1 - row * (high + gap)
        space = 0.075 if self.columns > 1 else 0.0
        width = (1 - space * (self.columns - 1)) / self.columns
        left = column * (width + space)
        return [left, min(1.0, left + width)], [max(0.0, upper - high), min(1.0, upper)]


def panel_grid(
    count: int, columns: int | None, each: int, *, top: int = 64, bottom: int = 48, gap: int = 46
) -> PanelGrid:
    """Return a grid of panels `each` pixels high; without `columns`, up to three are chosen."""
    columns = columns or (1 if count <= 4 else 2 if count <= 8 else 3)
    columns = max(1, min(columns, count))
    rows = math.ceil(count / columns)
    height = rows * each + (rows - 1) * gap + top + bottom
    return PanelGrid(count, columns, height, top, bottom, gap)


def axis_id(letter: str, number: int) -> str:
    """Return what a trace calls an axis.

    >>> axis_id("y", 0), axis_id("y", 2)
    ('y', 'y3')
    """
    return f"{letter}{number + 1}" if number else letter


def axis_name(letter: str, number: int) -> str:
    """Return what a layout calls an axis: ``xaxis``, ``xaxis2`` …"""
    return f"{letter}axis{number + 1}" if number else f"{letter}axis"


def panel_title(words: str, grid: PanelGrid, number: int) -> dict[str, Any]:
    (left, _), (_, top) = grid.domain(number)
    title = text(words, 90 // grid.columns + 12)
    return note(title, left, top, 12, COLORS.ink, xanchor="left", yanchor="bottom", yshift=4)


def left_out_note(shown: int, total: int) -> list[dict[str, Any]]:
    """Return an annotation for names that have no room, if there are any."""
    words = f"the first {shown} of {total:,} names"
    place = {"xanchor": "right", "yanchor": "bottom", "yshift": 4}
    return [note(words, 1, 1, 11, COLORS.dim, **place)] if shown < total else []


def step_line(step: int, xref: str = "x") -> dict[str, Any]:
    """Return a vertical line at the chosen step, across all panels of a column."""
    return {
        "type": "line", "name": "step", "x0": step, "x1": step, "y0": 0, "y1": 1, "xref": xref,
        "yref": "paper", "line": {"color": COLORS.marked, "width": 1, "dash": "dot"},
        "layer": "above",
    }  # fmt: skip


def spans_decades(values: Floats) -> bool:
    """Return whether values need a logarithmic axis: none is negative, and they differ widely."""
    above = values[np.isfinite(values) & (values > 0)]
    return bool(len(above) and not (values < 0).any() and above.max() > 50 * above.min())


def log_axis(values: Floats, most: int = 5) -> dict[str, Any]:
    """Return a logarithmic axis with ticks at decades, or at numbers where there are few."""
    above = values[np.isfinite(values) & (values > 0)]
    decades = float(np.log10(above.max() / above.min())) if len(above) else 0.0
    axis = {"type": "log", "exponentformat": "power"}
    if decades > 1.5:
        # plotly draws powers a quarter larger than their font size
        return {**axis, "dtick": max(1, math.ceil(decades / most)), "tickfont": {"size": 9}}
    return {**axis, "dtick": "D2", "nticks": most}


def whole_ticks(size: float) -> dict[str, Any]:
    """Return tick options for an axis of integers: on a short one plotly would label halves."""
    return {"dtick": 1} if size < 8 else {}


# -- traces --------------------------------------------------------------------------------


def line_trace(x: NDArray[Any], y: Floats, pixels: int, **more: Any) -> dict[str, Any]:
    """Return a line over rising `x`, thinned to what so many pixels can show; NaN is a gap."""
    kept = decimate(x, y, pixels)
    return {
        "type": "scatter", "mode": "lines+markers" if len(kept) <= 40 else "lines",
        "x": typed(x[kept]), "y": typed(y[kept]), "marker": {"size": 4}, **more,
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
        symbol="square", size=6, edge=COLORS.page, name=legend, hoverinfo="skip",
    )  # fmt: skip
    return [flat_trace(mask, typed(x), encoded, color, **flat), key]


def decimate(x: NDArray[np.generic], y: Floats, width: int) -> Integers:
    """Return which points of a line with rising `x` to draw, at most five per pixel.

    Each pixel keeps its first, last, smallest and largest value, and one NaN: a gap in the line.
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
