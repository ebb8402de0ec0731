"""Images: a matrix with one cell per value or per block of values, and tiles side by side.

Tiles are the last two axes of a tensor: filters of a convolution, or channels of its output.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tensortap.rooms.watch.films.canvas import Canvas
from tensortap.rooms.watch.films.legend import draw_cell_axes, draw_color_bar
from tensortap.rooms.watch.films.picture import ColorScale, FrameContent, Picture, color_indices
from tensortap.rooms.watch.films.style import Box, FrameLayout, Style
from tensortap.text.colors import NAN
from tensortap.text.reals import reals, shrink

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


class GridPicture(Picture):
    """Tiles with a common color scale."""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        super().__init__(style, layout)
        self.scale = ColorScale(style)

    def draw(self, canvas: Canvas, content: FrameContent) -> None:
        """Draw the tiles and the color bar."""
        self.scale.update(content.summary)
        layout = self._layout
        room = layout.room._replace(right=layout.room.right - layout.bar_width)
        grid = tile_shape(content.inner)
        assert grid is not None
        count, rows, columns = grid
        least = max(5, _SMALLEST * min(rows, columns) // max(rows, columns))
        shown = min(count, max(1, room.width // least) * max(1, room.height // least))
        across = _tiles_across(shown, rows, columns, room)
        down = math.ceil(shown / across)
        side = min(room.width / (across * columns), room.height / (down * rows))
        wide, high = max(1, int(side * columns) - 1), max(1, int(side * rows) - 1)
        if wide >= columns and high >= rows:  # whole pixels per cell
            whole = min(wide // columns, high // rows)
            wide, high = whole * columns, whole * rows
        chosen = np.arange(shown) * count // shown  # an even choice, if not all have room
        tiles = content.reshaped(grid)[chosen]
        if rows > high or columns > wide:
            tiles = np.stack([shrink(tile, high, wide, self.scale.middle) for tile in tiles])
        indices = color_indices(reals(tiles), self.scale.limits, content.is_finite)
        # each tile with a line of background below and on its right
        pixels = np.full((down * across, high + 1, wide + 1), canvas.pixels[0, 0], np.uint32)
        pixels[:shown, :high, :wide] = enlarged(self.scale.pixels[indices], high, wide)
        mosaic = pixels.reshape(down, across, high + 1, wide + 1).swapaxes(1, 2)
        mosaic = mosaic.reshape(down * (high + 1), across * (wide + 1))
        self.box = box = room.centered(across * (wide + 1) - 1, down * (high + 1) - 1)
        canvas.pixels[box.top : box.bottom, box.left : box.right] = mosaic[:-1, :-1]
        draw_color_bar(canvas, layout, box, self.scale.pixels, self.scale.limits)
        many = f"{shown:,} of {count:,}" if shown < count else f"{count:,}"
        less = shrink_note((rows, columns), (high, wide), "pixel")
        self.note = " · ".join(filter(None, (f"{many} tiles of {rows}x{columns}", less)))


def _tiles_across(tiles: int, rows: int, columns: int, room: Box) -> int:
    """Return how many tiles go side by side for the largest tiles."""

    def side(across: int) -> float:
        return min(room.width / (across * columns), room.height / (-(-tiles // across) * rows))

    return max(range(1, tiles + 1), key=side)
