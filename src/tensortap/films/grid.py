"""Filters or channels as tiles: the last two axes of a tensor, side by side."""

from __future__ import annotations

import math

from tensortap.films.canvas import Canvas
from tensortap.films.image import enlarged, paint_matrix, shrink_note
from tensortap.films.legend import draw_bar_ticks, draw_color_bar
from tensortap.films.picture import ColorScale, FrameContent, Picture, color_indices
from tensortap.films.style import Box, FrameLayout, Style
from tensortap.viz.reals import reals

_SMALLEST = 12  # pixels along the longer side of a tile


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
