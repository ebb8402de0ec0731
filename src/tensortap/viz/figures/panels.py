"""Small multiples: panels in rows and columns that share one axis of steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.viz.figures.theme import Theme, text

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Grid(NamedTuple):
    """Where panels lie; panel `n` has the axes ``x{column}`` and ``y{n}``."""

    panels: int
    columns: int
    height: int  # of the figure
    top: int
    bottom: int
    gap: int  # pixels between two rows, for the title of the lower one and labels

    @property
    def rows(self) -> int:
        return math.ceil(self.panels / self.columns)

    def domain(self, number: int) -> tuple[list[float], list[float]]:
        """The part of the width and of the height that a panel has."""
        row, column = divmod(number, self.columns)
        inner = max(1, self.height - self.top - self.bottom)
        gap = self.gap / inner
        high = max((1 - gap * (self.rows - 1)) / self.rows, 0.01)
        upper = 1 - row * (high + gap)
        wide = 0.075 if self.columns > 1 else 0.0
        width = (1 - wide * (self.columns - 1)) / self.columns
        left = column * (width + wide)
        return [left, min(1.0, left + width)], [max(0.0, upper - high), min(1.0, upper)]


def grid(
    count: int, columns: int | None, each: int, *, top: int = 64, bottom: int = 48, gap: int = 46
) -> Grid:
    """As many panels as needed; without `columns` one below the other, many in threes."""
    wide = columns or (1 if count <= 4 else 2 if count <= 8 else 3)
    wide = max(1, min(wide, count))
    rows = math.ceil(count / wide)
    return Grid(count, wide, rows * each + (rows - 1) * gap + top + bottom, top, bottom, gap)


def axis_id(letter: str, number: int) -> str:
    """``x``, ``x2`` …: what a trace names its axis.

    >>> axis_id("y", 0), axis_id("y", 2)
    ('y', 'y3')
    """
    return letter if not number else f"{letter}{number + 1}"


def axis_name(letter: str, number: int) -> str:
    """``xaxis``, ``xaxis2`` …: what the layout calls it."""
    return f"{letter}axis{'' if not number else number + 1}"


def heading(words: str, grid: Grid, number: int, theme: Theme) -> dict[str, Any]:
    """The title of a panel."""
    x, y = grid.domain(number)
    return {
        "text": text(words, 90 // grid.columns + 12),
        "x": x[0],
        "y": y[1],
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": 4,
        "showarrow": False,
        "font": {"size": 12, "color": theme.ink},
    }


def step_line(step: int, xref: str, theme: Theme) -> dict[str, Any]:
    """The chosen step across all panels of a column."""
    return {
        "type": "line",
        "name": "step",
        "x0": step,
        "x1": step,
        "y0": 0,
        "y1": 1,
        "xref": xref,
        "yref": "paper",
        "line": {"color": theme.marked, "width": 1, "dash": "dot"},
        "layer": "above",
    }


def log_axis(values: NDArray[np.float64], most: int = 5) -> dict[str, Any]:
    """A logarithmic axis for values: decades where there are some, else plain numbers."""
    above = values[np.isfinite(values) & (values > 0)]
    decades = float(np.log10(above.max() / above.min())) if len(above) else 0.0
    if decades > 1.5:
        by = max(1, math.ceil(decades / most))
        # plotly draws powers a quarter larger than it is told
        small = {"tickfont": {"size": 9}}
        return {"type": "log", "exponentformat": "power", "dtick": by, **small}
    return {"type": "log", "exponentformat": "power", "dtick": "D2", "nticks": most}
