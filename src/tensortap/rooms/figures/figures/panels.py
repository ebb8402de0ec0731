"""Small multiples and axes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.page.encoding import text
from tensortap.rooms.figures.figures.theme import FigureTheme, note

_DECADES = 50.0  # a larger ratio of the largest to the smallest value gets a logarithmic axis
_FEW = 8


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


def panel_title(words: str, grid: PanelGrid, number: int, theme: FigureTheme) -> dict[str, Any]:
    """Return the title of a panel as an annotation."""
    (left, _), (_, top) = grid.domain(number)
    title = text(words, 90 // grid.columns + 12)
    return note(title, left, top, 12, theme.ink, xanchor="left", yanchor="bottom", yshift=4)


def left_out_note(shown: int, total: int, theme: FigureTheme) -> list[dict[str, Any]]:
    """Return an annotation for names that have no room, if there are any."""
    words = f"the first {shown} of {total:,} names"
    place = {"xanchor": "right", "yanchor": "bottom", "yshift": 4}
    return [note(words, 1, 1, 11, theme.dim, **place)] if shown < total else []


def step_line(step: int, xref: str, theme: FigureTheme) -> dict[str, Any]:
    """Return a vertical line at the chosen step, across all panels of a column."""
    return {
        "type": "line", "name": "step", "x0": step, "x1": step, "y0": 0, "y1": 1, "xref": xref,
        "yref": "paper", "line": {"color": theme.marked, "width": 1, "dash": "dot"},
        "layer": "above",
    }  # fmt: skip


def spans_decades(values: NDArray[np.float64]) -> bool:
    """Return whether values need a logarithmic axis: none is negative, and they differ widely."""
    above = values[np.isfinite(values) & (values > 0)]
    return bool(len(above) and not (values < 0).any() and above.max() > _DECADES * above.min())


def log_axis(values: NDArray[np.float64], most: int = 5) -> dict[str, Any]:
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
    return {"dtick": 1} if size < _FEW else {}
