"""Images: a matrix with one cell per value or per block of values."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tensortap.rooms.figures.colors import NAN
from tensortap.rooms.figures.reals import shrink
from tensortap.rooms.watch.films.canvas import Canvas
from tensortap.rooms.watch.films.legend import draw_cell_axes, draw_color_bar
from tensortap.rooms.watch.films.picture import ColorScale, FrameContent, Picture, color_indices
from tensortap.rooms.watch.films.style import Box, FrameLayout, Style

_SQUARE = 0.4  # cells are stretched if square ones would fill less of the room
_WHOLE = 0.86  # a picture may shrink this much for cells of whole pixels
_VISIBLE = 3  # smallest size of a NaN or Inf in pixels; in a shrunk picture two more
_MAX_MARKS = 4096


def fit(rows: int, columns: int, width: int, height: int) -> tuple[int, int]:
    """Return width and height of a picture: square cells, unless that wastes the room.

    >>> fit(256, 256, 520, 380), fit(10, 10, 520, 385), fit(4, 4000, 520, 380)
    ((380, 380), (380, 380), (520, 380))
    """
    side = min(width / columns, height / rows)
    if side * columns * side * rows < _SQUARE * width * height:
        return width, height
    if side >= 1 and int(side) / side >= _WHOLE:
        side = int(side)
    return max(1, round(side * columns)), max(1, round(side * rows))


class ImagePicture(Picture):
    """A matrix, cell by cell."""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        super().__init__(style, layout)
        self.scale = ColorScale(style)

    def draw(self, canvas: Canvas, content: FrameContent) -> None:
        """Draw the cells, their axes and the color bar."""
        self.scale.update(content.summary)
        layout, room = self._layout, self._layout.room
        rows, columns = content.inner
        room = Box(
            room.left + round(layout.small * (0.7 * len(str(rows - 1)) + 0.9)), room.top,
            room.right - layout.bar_width, room.bottom - layout.small - 8,
        )  # fmt: skip
        width, height = fit(rows, columns, room.width, room.height)
        self.box = box = room.centered(width, height)
        self.note = shrink_note(content.inner, (height, width), "pixel")
        draw_color_bar(canvas, layout, box, self.scale.pixels, self.scale.limits)
        draw_cell_axes(canvas, layout, box, rows, columns)
        matrix = content.reshaped(content.inner)
        cells = shrink(matrix, height, width, self.scale.middle)
        indices = color_indices(cells, self.scale.limits, content.is_finite)
        canvas.pixels[box.top : box.bottom, box.left : box.right] = enlarged(
            self.scale.pixels[indices], height, width
        )
        if not content.is_finite and (
            height < _VISIBLE * len(cells) or width < _VISIBLE * cells.shape[1]
        ):
            reach = _VISIBLE // 2 + (matrix.shape != cells.shape)
            _mark_nonfinite(canvas, box, indices, self.scale.pixels, reach)


def shrink_note(shape: tuple[int, ...], cells: tuple[int, int], unit: str) -> str:
    """Return a note if one cell stands for several values.

    >>> shrink_note((1000, 50), (300, 300), "pixel"), shrink_note((8, 8), (300, 300), "pixel")
    ('up to 4x1 values per pixel', '')
    """
    rows, columns = (math.ceil(n / room) for n, room in zip(shape, cells, strict=True))
    return f"up to {rows}x{columns} values per {unit}" if max(rows, columns) > 1 else ""


def enlarged(pixels: NDArray[np.uint32], height: int, width: int) -> NDArray[np.uint32]:
    """Repeat pixels along the last two axes up to a size."""
    rows, columns = pixels.shape[-2:]
    if rows != height:
        pixels = pixels.take(np.arange(height) * rows // height, axis=-2)
    if columns != width:
        pixels = pixels.take(np.arange(width) * columns // width, axis=-1)
    return pixels


def _mark_nonfinite(
    canvas: Canvas,
    box: Box,
    indices: NDArray[np.uint8],
    pixels: NDArray[np.uint32],
    reach: int,
) -> None:
    """Enlarge cells that are not finite: video halves the resolution of colors."""
    rows, columns = np.nonzero(indices >= NAN)
    if len(rows) > _MAX_MARKS:
        return
    colors = pixels[indices[rows, columns]]
    y = box.top + (2 * rows + 1) * box.height // (2 * indices.shape[0])
    x = box.left + (2 * columns + 1) * box.width // (2 * indices.shape[1])
    for dy in range(-reach, reach + 1):
        for dx in range(-reach, reach + 1):
            down = np.clip(y + dy, box.top, box.bottom - 1)
            across = np.clip(x + dx, box.left, box.right - 1)
            canvas.pixels[down, across] = colors
