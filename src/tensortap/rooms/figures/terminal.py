"""A tensor as a small heatmap of characters, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from tensortap.rooms.figures import colors
from tensortap.rooms.figures.reals import Range, matrix_at, nonempty, reals, shares_of, shrink
from tensortap.stats.conversion import is_number
from tensortap.text.tensors import number

_SHADES = " ·░▒▓█"  # for terminals without color
_NAN, _INF = "!", "^"


def heatmap(
    array: NDArray[Any],
    index: Sequence[int] | None = None,
    *,
    width: int = 72,
    height: int = 20,
    colored: bool = True,
) -> Text | None:
    """Return a heatmap with a line that explains its colors; None if there is nothing to draw.

    In color, a character is two cells, one above the other. NaN is `!` and an infinity `^`; a cell
    that stands for many elements shows these first, then the value farthest from the middle.
    """
    if not is_number(array.dtype) or array.size < 2:
        return None
    matrix, label = matrix_at(array, index)
    if matrix.ndim < 2:
        matrix = matrix.reshape(1, -1)
    values = reals(matrix)
    finite = values[np.isfinite(values)]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    signed = low < 0 < high
    if signed:  # zero is in the middle of the colors
        low, high = -max(high, -low), max(high, -low)
    if colored:
        height *= 2
    cells = shrink(matrix, height, width, low / 2 + high / 2)
    caption = f"{label}  " if label else ""
    caption += f"{number(low)} to {number(high)}"
    if cells.shape == matrix.shape:
        cells = _enlarged(cells, width, height, 1 if colored else 2)
    else:
        down, across = (math.ceil(n / m) for n, m in zip(matrix.shape, cells.shape, strict=True))
        block = f"{down}×{across}" if down > 1 else f"{across}"
        caption += f"; each cell shows the extreme of {block} elements"
    picture = Text(no_wrap=True)
    if colored:
        table = colors.color_table(colors.DIVERGING if signed else colors.SEQUENTIAL)
        _paint(picture, cells, table[_levels(cells, (low, high), len(table))])
    else:
        for row, levels in zip(cells, _levels(cells, (low, high), len(_SHADES)), strict=True):
            line = (_mark(x) or _SHADES[n] for x, n in zip(row, levels, strict=True))
            picture.append("".join(line) + "\n")
    return picture.append(caption, style="dim")


def _enlarged(cells: NDArray[Any], width: int, height: int, stretch: int) -> NDArray[Any]:
    """Repeat the cells of a small matrix; a character is `stretch` times as high as wide."""
    rows, columns = cells.shape
    times = max(1, min(4, height // rows, width // (columns * stretch)))
    stretch = max(1, min(times * stretch, width // columns))
    return cells.repeat(times, 0).repeat(stretch, 1)


def _levels(cells: NDArray[Any], limits: Range, steps: int) -> NDArray[np.intp]:
    levels = np.nan_to_num(shares_of(cells, nonempty(*limits)) * steps)
    return np.asarray(np.minimum(levels, steps - 1), np.intp)


def _mark(x: float) -> str:
    return _NAN if math.isnan(x) else _INF if math.isinf(x) else ""


def _paint(picture: Text, cells: NDArray[Any], rgb: NDArray[np.uint8]) -> None:
    """Append two rows of cells per line: the upper is the character, the lower its background."""
    for i in range(0, len(cells), 2):
        below = i + 1 < len(cells)
        for j, upper in enumerate(cells[i]):
            mark = _mark(upper) or (_mark(cells[i + 1][j]) if below else "")
            if mark:
                bad = colors.NAN_COLOR if mark == _NAN else colors.POSINF_COLOR
                picture.append(mark, style=f"bold #ffffff on {_hex(bad)}")
            else:
                background = f" on {_hex(rgb[i + 1][j])}" if below else ""
                picture.append("▀", style=f"{_hex(rgb[i][j])}{background}")
        picture.append("\n")


def _hex(rgb: Sequence[int] | NDArray[np.uint8]) -> str:
    return f"#{rgb[0]:02x}{rgb[1]:02x}{rgb[2]:02x}"
