"""A matrix as an image: a cell a value, or a cell a block, of which the extreme is shown."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tensortap.films.canvas import Canvas
from tensortap.films.legend import bar_ticks, bar_width, cell_axes, color_bar
from tensortap.films.look import Look
from tensortap.films.shades import Shades, indices
from tensortap.films.style import Box, Measures, Style
from tensortap.viz.colors import NAN
from tensortap.viz.reals import shrink

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SQUARE = 0.4  # of the room a picture has to fill, or its cells are stretched
_EVEN = 0.86  # of its size that a picture may give up for cells of the same number of pixels
_SEEN = 3  # pixels that something not finite takes at least, and two more in a shrunk picture
_MOST_MARKS = 4096


def fit(rows: int, columns: int, width: int, height: int) -> tuple[int, int]:
    """Width and height of a picture of so many cells: square ones, unless that wastes the room.

    >>> fit(256, 256, 520, 380), fit(10, 10, 520, 385), fit(4, 4000, 520, 380)
    ((380, 380), (380, 380), (520, 380))
    """
    side = min(width / columns, height / rows)
    if side * columns * side * rows < _SQUARE * width * height:
        return _even(width, columns), _even(height, rows)
    if side >= 1 and int(side) / side >= _EVEN:
        side = int(side)
    return max(1, round(side * columns)), max(1, round(side * rows))


def _even(room: int, cells: int) -> int:
    whole = room // cells * cells
    return whole if whole >= _EVEN * room else room


class ImagePicture:
    """A matrix, cell by cell."""

    aside = ""

    def __init__(self, style: Style, at: Measures) -> None:
        self._style, self._at = style, at
        self.shades = Shades(style)
        self.note = ""
        self._box = self._bar = Box(0, 0, 1, 1)

    def see(self, look: Look) -> object:
        """What the still part of the frame depends on."""
        self.shades.see(look.summary)
        self._place(self._at.room(self._style.size), look.inner)
        self.note = shrunk(look.inner, (self._box.height, self._box.width), "a pixel")
        return self.shades.symmetric

    def _place(self, box: Box, shape: tuple[int, ...]) -> None:
        """Where the cells are."""
        at = self._at
        rows, columns = shape
        beside, below = 0, 0
        if at.header:
            beside, below = round(at.small * (0.7 * len(str(rows - 1)) + 0.9)), at.small + 8
        room = Box(box.left + beside, box.top, box.right - bar_width(at), box.bottom - below)
        width, height = fit(rows, columns, room.width, room.height)
        left = room.left + (room.width - width) // 2
        top = room.top + (room.height - height) // 2
        self._box = Box(left, top, left + width, top + height)

    def still(self, canvas: Canvas, box: Box, look: Look) -> None:
        """Axes and the colour bar."""
        at, cells = self._at, self._box
        rows, columns = look.inner
        if at.header:
            canvas.frame(*cells, self._style.colors.line)
            # beside the picture and as high as it
            end = min(box.right, cells.right + bar_width(at) + at.small)
            bar = Box(cells.left, cells.top, end, cells.bottom)
            self._bar = color_bar(canvas, at, bar, self.shades.pixels)
        cell_axes(canvas, self._style, at, cells, (rows, columns))

    def draw(self, canvas: Canvas, box: Box, look: Look) -> None:
        """The cells of this frame."""
        matrix = look.matrix
        assert matrix is not None
        summary = look.summary
        finite = summary is not None and summary.finite == summary.count
        paint(canvas, self._box, matrix, self.shades, finite)
        if self._at.header:
            bar_ticks(canvas, self._style, self._at, self._bar, self.shades.limits)


def shrunk(shape: tuple[int, ...], cells: tuple[int, int], what: str) -> str:
    """What is said where one cell has to stand for several values, the extreme of them.

    >>> shrunk((1000, 50), (300, 300), "a pixel"), shrunk((8, 8), (300, 300), "a pixel")
    ('up to 4x1 values a pixel', '')
    """
    block = [max(1, math.ceil(n / room)) for n, room in zip(shape, cells, strict=True)]
    return f"up to {block[0]}x{block[1]} values {what}" if max(block) > 1 else ""


def paint(canvas: Canvas, box: Box, matrix: NDArray[Any], shades: Shades, finite: bool) -> None:
    """A matrix into a box, from edge to edge."""
    import numpy as np

    cells = shrink(matrix, box.height, box.width, shades.middle)
    found = indices(cells, shades.limits, finite)
    rows, columns = found.shape
    pixels = shades.pixels[found]
    if rows != box.height:
        pixels = pixels.take(np.arange(box.height) * rows // box.height, axis=0)
    if columns != box.width:
        pixels = pixels.take(np.arange(box.width) * columns // box.width, axis=1)
    canvas.pixels[box.top : box.bottom, box.left : box.right] = pixels
    if not finite and (box.height < _SEEN * rows or box.width < _SEEN * columns):
        reach = _SEEN // 2 + (matrix.shape != cells.shape)
        _mark(canvas, box, found, shades.pixels, reach)


def _mark(
    canvas: Canvas,
    box: Box,
    found: NDArray[np.uint8],
    pixels: NDArray[np.uint32],
    reach: int,
) -> None:
    """A cell of one pixel would vanish in the colours of a film, which are half as fine."""
    import numpy as np

    rows, columns = np.nonzero(found >= NAN)
    if len(rows) > _MOST_MARKS:
        return
    colors = pixels[found[rows, columns]]
    y = box.top + (2 * rows + 1) * box.height // (2 * found.shape[0])
    x = box.left + (2 * columns + 1) * box.width // (2 * found.shape[1])
    for dy in range(-reach, reach + 1):
        for dx in range(-reach, reach + 1):
            down = np.clip(y + dy, box.top, box.bottom - 1)
            across = np.clip(x + dx, box.left, box.right - 1)
            canvas.pixels[down, across] = colors
