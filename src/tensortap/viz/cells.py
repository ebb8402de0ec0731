"""A tensor as a small heatmap in characters, for a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.errors import TensortapError
from tensortap.text.tensors import number
from tensortap.viz import colors
from tensortap.viz.reals import is_number, reals, shrink

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.text import Text

_SHADES = " ·░▒▓█"  # where there is no colour
_NAN, _INF = "!", "^"


class Slice(NamedTuple):
    """A matrix of a tensor, and where in it it lies."""

    matrix: NDArray[Any]
    where: str  # "" for all of it, else like "[0, 3, :, :]"


def slice_of(array: NDArray[Any], at: tuple[int, ...] | None = None) -> Slice:
    """The last two axes, at an index of the others: the first one, if none is said.

    >>> import numpy as np
    >>> slice_of(np.zeros((2, 3, 4, 5)), (1, 2)).where
    '[1, 2, :, :]'
    """
    leading = array.shape[:-2]
    if at is None:
        at = (0,) * len(leading)
    elif len(at) != len(leading):
        raise TensortapError(
            f"a tensor of shape {list(array.shape)} is shown at {len(leading)} "
            f"{'index' if len(leading) == 1 else 'indices'}, not at {list(at)}"
        )
    for index, length in zip(at, leading, strict=True):
        if not -length <= index < length:
            raise TensortapError(f"no {list(at)} in a tensor of shape {list(array.shape)}")
    matrix = array[at] if at else array
    if matrix.ndim < 2:
        matrix = matrix.reshape(1, -1)
    return Slice(matrix, f"[{', '.join(map(str, at))}, :, :]" if at else "")


def heatmap(
    array: NDArray[Any],
    at: tuple[int, ...] | None = None,
    *,
    width: int = 72,
    height: int = 20,
    colored: bool = True,
) -> Text | None:
    """The picture, with a line that says what the colours mean; None where there is none to draw.

    In colour a character is two cells, one above the other. NaN is `!` and an infinity `^`,
    and neither is ever lost where a cell stands for many elements: of the others it shows the
    one farthest from the middle of the range.
    """
    import numpy as np
    from rich.text import Text

    if not is_number(array.dtype) or array.size < 2 or array.ndim < 1:
        return None
    matrix, where = slice_of(array, at)
    whole = reals(matrix)
    finite = whole[np.isfinite(whole)]
    if not finite.size:
        return None  # the line of the tensor says it all
    low, high = float(finite.min()), float(finite.max())
    zero_inside = low < 0 < high
    if zero_inside:  # the middle of the colours is zero
        high = max(high, -low)
        low = -high
    cells = shrink(matrix, height * (2 if colored else 1), width, low / 2 + high / 2)
    drawn = cells.shape
    if drawn == matrix.shape:
        cells = _larger(cells, width, height * 2 if colored else height, 1 if colored else 2)
    shown = Text(no_wrap=True)
    if colored:
        table = colors.table_of(colors.DIVERGING if zero_inside else colors.SEQUENTIAL)
        _paint(shown, cells, _levels(cells, low, high, len(table)), table)
    else:
        _shade(shown, cells, _levels(cells, low, high, len(_SHADES)))
    caption = f"{number(low)} to {number(high)}"
    if drawn != matrix.shape:
        down, across = (math.ceil(n / m) for n, m in zip(matrix.shape, drawn, strict=True))
        each = f"{down}×{across}" if matrix.shape[0] > 1 else f"{across}"
        caption += f"; a cell is the farthest from the middle of {each} elements"
    shown.append(f"{where + '  ' if where else ''}{caption}", style="dim")
    return shown


def _larger(cells: NDArray[Any], width: int, height: int, stretch: int) -> NDArray[Any]:
    """A small matrix so large that one sees it; a character is `stretch` times as high as wide."""
    rows, columns = cells.shape
    times = max(1, min(4, height // rows, width // (columns * stretch)))
    stretch = max(1, min(times * stretch, width // columns))
    return cells.repeat(times, 0).repeat(stretch, 1)


def _levels(cells: NDArray[Any], low: float, high: float, steps: int) -> NDArray[np.intp]:
    import numpy as np

    with np.errstate(all="ignore"):
        # halves: the range of float64 itself is wider than float64
        share = (cells / 2 - low / 2) / (high / 2 - low / 2) if high > low else cells * 0 + 0.5
        return (
            np.nan_to_num(share * steps, nan=0, posinf=0, neginf=0)
            .clip(0, steps - 1)
            .astype(np.intp)
        )


def _shade(shown: Text, cells: NDArray[Any], levels: NDArray[np.intp]) -> None:
    for row, line in zip(cells.tolist(), levels.tolist(), strict=True):
        shown.append("".join(_mark(x) or _SHADES[n] for x, n in zip(row, line, strict=True)))
        shown.append("\n")


def _mark(x: float) -> str:
    return _NAN if math.isnan(x) else _INF if math.isinf(x) else ""


def _paint(
    shown: Text, cells: NDArray[Any], levels: NDArray[np.intp], table: NDArray[np.uint8]
) -> None:
    """Two rows of cells a line: the upper one is the letter, the lower one the ground."""
    rgb = table[levels].tolist()
    values = cells.tolist()
    for i in range(0, len(values), 2):
        below = i + 1 < len(values)
        for j, upper in enumerate(values[i]):
            lower = values[i + 1][j] if below else 0.0
            mark = _mark(upper) or _mark(lower)
            if mark:
                bad = colors.NAN_COLOR if mark == _NAN else colors.POSINF_COLOR
                shown.append(mark, style=f"bold #ffffff on {_hex(bad)}")
            else:
                ground = f" on {_hex(rgb[i + 1][j])}" if below else ""
                shown.append("▀", style=f"{_hex(rgb[i][j])}{ground}")
        shown.append("\n")


def _hex(rgb: tuple[int, int, int]) -> str:
    return f"#{rgb[0]:02x}{rgb[1]:02x}{rgb[2]:02x}"
