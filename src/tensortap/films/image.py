"""A matrix as an image: one cell per value, or per block of values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.films.canvas import Canvas
from tensortap.films.legend import draw_bar_ticks, draw_cell_axes, draw_color_bar
from tensortap.films.picture import ColorScale, FrameContent, Picture, color_indices
from tensortap.films.style import Box, FrameLayout, Style
from tensortap.viz.colors import NAN
from tensortap.viz.reals import shrink

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
        return _whole_cells(width, columns), _whole_cells(height, rows)
    if side >= 1 and int(side) / side >= _WHOLE:
        side = int(side)
    return max(1, round(side * columns)), max(1, round(side * rows))


def _whole_cells(room: int, cells: int) -> int:
    size = room // cells * cells
    return size if size >= _WHOLE * room else room


class ImagePicture(Picture):
    """A matrix, cell by cell."""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        super().__init__(style, layout)
        self.scale = ColorScale(style)
        self._box = self._bar = Box(0, 0, 1, 1)

    def prepare(self, content: FrameContent) -> object:
        """Place the cells; return what the still part depends on."""
        self.scale.update(content.summary)
        layout, room = self._layout, self._layout.room
        rows, columns = content.inner
        if layout.header:
            left = room.left + round(layout.small * (0.7 * len(str(rows - 1)) + 0.9))
            room = room._replace(left=left, bottom=room.bottom - layout.small - 8)
        room = room._replace(right=room.right - layout.bar_width)
        width, height = fit(rows, columns, room.width, room.height)
        left = room.left + (room.width - width) // 2
        top = room.top + (room.height - height) // 2
        self._box = Box(left, top, left + width, top + height)
        self.note = shrink_note(content.inner, (height, width), "pixel")
        return self.scale.symmetric

    def draw_still(self, canvas: Canvas, content: FrameContent) -> None:
        """Draw axes and the color bar."""
        self._bar = draw_color_bar(canvas, self._layout, self._box, self.scale.pixels)
        draw_cell_axes(canvas, self._layout, self._box, *content.inner)

    def draw_moving(self, canvas: Canvas, content: FrameContent) -> None:
        """Draw the cells."""
        matrix = content.reshaped(content.inner)
        paint_matrix(canvas, self._box, matrix, self.scale, content.is_finite)
        draw_bar_ticks(canvas, self._layout, self._bar, self.scale.limits)


def shrink_note(shape: tuple[int, ...], cells: tuple[int, int], unit: str) -> str:
    """Return a note if one cell stands for several values.

    >>> shrink_note((1000, 50), (300, 300), "pixel"), shrink_note((8, 8), (300, 300), "pixel")
    ('up to 4x1 values per pixel', '')
    """
    rows, columns = (math.ceil(n / room) for n, room in zip(shape, cells, strict=True))
    return f"up to {rows}x{columns} values per {unit}" if max(rows, columns) > 1 else ""


def paint_matrix(
    canvas: Canvas, box: Box, matrix: NDArray[Any], scale: ColorScale, finite: bool
) -> None:
    """Draw a matrix into a box, from edge to edge."""
    cells = shrink(matrix, box.height, box.width, scale.middle)
    indices = color_indices(cells, scale.limits, finite)
    rows, columns = indices.shape
    canvas.pixels[box.top : box.bottom, box.left : box.right] = enlarged(
        scale.pixels[indices], box.height, box.width
    )
    if not finite and (box.height < _VISIBLE * rows or box.width < _VISIBLE * columns):
        reach = _VISIBLE // 2 + (matrix.shape != cells.shape)
        _mark_nonfinite(canvas, box, indices, scale.pixels, reach)


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
