"""Images: a matrix with one cell per value or per block of values, and tiles side by side.

Tiles are the last two axes of a tensor: filters of a convolution, or channels of its output.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.rooms.figures.colors import NAN
from tensortap.rooms.figures.reals import reals, shrink
from tensortap.rooms.watch.films.canvas import Canvas
from tensortap.rooms.watch.films.legend import draw_bar_ticks, draw_cell_axes, draw_color_bar
from tensortap.rooms.watch.films.picture import ColorScale, FrameContent, Picture, color_indices
from tensortap.rooms.watch.films.style import Box, FrameLayout, Style

_SQUARE = 0.4  # cells are stretched if square ones would fill less of the room
_WHOLE = 0.86  # a picture may shrink this much for cells of whole pixels
_VISIBLE = 3  # smallest size of a NaN or Inf in pixels; in a shrunk picture two more
_MAX_MARKS = 4096
_SMALLEST = 12  # pixels along the longer side of a tile


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
        room = Box(
            room.left + round(layout.small * (0.7 * len(str(rows - 1)) + 0.9)), room.top,
            room.right - layout.bar_width, room.bottom - layout.small - 8,
        )  # fmt: skip
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


def tile_shape(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return number, rows and columns of tiles; None for a shape that has none.

    A matrix has one tile per row if the length of a row is a square number, as the weights of a
    layer that looks at images.

    >>> tile_shape((16, 3, 5, 5)), tile_shape((10, 784)), tile_shape((10, 7))
    ((48, 5, 5), (10, 28, 28), None)
    """
    if len(shape) >= 3:
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    if len(shape) == 2 and math.isqrt(shape[1]) ** 2 == shape[1] > 1:
        return shape[0], math.isqrt(shape[1]), math.isqrt(shape[1])
    return None


def arrange(tiles: int, rows: int, columns: int, box: Box, row: int = 0) -> tuple[int, int]:
    """Return how many tiles go side by side and one above the other.

    `row` is a natural number of tiles per row, such as the channels of a filter.

    >>> arrange(64, 5, 5, Box(0, 0, 500, 400))
    (8, 8)
    """
    best, chosen = 0.0, (1, 1)
    for across in range(1, tiles + 1):
        down = math.ceil(tiles / across)
        side = min(box.width / (across * columns), box.height / (down * rows))
        score = side * (1.25 if row and across % row == 0 else 1.0)
        if score > best:
            best, chosen = score, (across, down)
    return chosen


class GridPicture(Picture):
    """Tiles with a common color scale."""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        super().__init__(style, layout)
        self.scale = ColorScale(style)
        self._tiles: list[tuple[int, Box]] = []
        self._shape: tuple[int, ...] = ()
        self._grid = 0, 1, 1
        self._all = self._bar = Box(0, 0, 1, 1)

    def prepare(self, content: FrameContent) -> object:
        """Place the tiles; return what the still part depends on."""
        self.scale.update(content.summary)
        grid = tile_shape(content.inner)
        assert grid is not None
        if content.inner != self._shape:
            self._shape, self._grid = content.inner, grid
            self._place_tiles()
        return self.scale.symmetric

    def _place_tiles(self) -> None:
        layout, room = self._layout, self._layout.room
        room = room._replace(right=room.right - layout.bar_width)
        count, rows, columns = self._grid
        wide, high = (
            max(4, _SMALLEST * side // max(rows, columns)) + 1 for side in (columns, rows)
        )
        shown = min(count, max(1, room.width // wide) * max(1, room.height // high))
        channels = self._shape[1] if len(self._shape) == 4 and shown == count else 0
        across, down = arrange(shown, rows, columns, room, channels)
        side = min(room.width / (across * columns), room.height / (down * rows))
        gap = max(1, round(min(side * columns, side * rows) * 0.06))
        wide, high = max(1, int(side * columns) - gap), max(1, int(side * rows) - gap)
        if wide >= columns and high >= rows:  # whole pixels per cell, if that costs little
            whole = max(1, min(wide // columns, high // rows))
            if whole * columns >= 0.8 * wide:
                wide, high = whole * columns, whole * rows
        width, height = across * (wide + gap) - gap, down * (high + gap) - gap
        left = room.left + (room.width - width) // 2
        top = room.top + (room.height - height) // 2
        self._all = Box(left, top, left + width, top + height)
        self._tiles = []
        for i in range(shown):
            x, y = left + i % across * (wide + gap), top + i // across * (high + gap)
            # an even choice, if not all have room
            self._tiles.append((i * count // shown, Box(x, y, x + wide, y + high)))
        many = f"{shown:,} of {count:,}" if shown < count else f"{count:,}"
        less = shrink_note((rows, columns), (high, wide), "pixel")
        self.note = " · ".join(filter(None, (f"{many} tiles of {rows}x{columns}", less)))

    def draw_still(self, canvas: Canvas, content: FrameContent) -> None:
        """Draw the color bar."""
        self._bar = draw_color_bar(canvas, self._layout, self._all, self.scale.pixels)

    def draw_moving(self, canvas: Canvas, content: FrameContent) -> None:
        """Draw the tiles."""
        tiles = content.reshaped(self._grid)
        _, rows, columns = self._grid
        first = self._tiles[0][1]
        if rows <= first.height and columns <= first.width:
            # every cell has pixels of its own: color all tiles at once
            values = reals(tiles[[index for index, _ in self._tiles]])
            indices = color_indices(values, self.scale.limits, content.is_finite)
            pixels = enlarged(self.scale.pixels[indices], first.height, first.width)
            for (_, box), tile in zip(self._tiles, pixels, strict=True):
                canvas.pixels[box.top : box.bottom, box.left : box.right] = tile
        else:
            for index, box in self._tiles:
                paint_matrix(canvas, box, tiles[index], self.scale, content.is_finite)
        draw_bar_ticks(canvas, self._layout, self._bar, self.scale.limits)
