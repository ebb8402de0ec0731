"""Filters or channels as tiles: the last two axes of a tensor, side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tensortap.films.canvas import Canvas
from tensortap.films.image import paint, shrunk
from tensortap.films.legend import bar_ticks, bar_width, color_bar
from tensortap.films.look import Look
from tensortap.films.shades import Shades, indices
from tensortap.films.style import Box, Measures, Style
from tensortap.viz.reals import reals

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SMALLEST = 12  # pixels of a tile's longer side


def tile_shape(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """How many tiles of how many rows and columns; None of what cannot be tiled.

    The rows of a matrix are tiles where their length is a square number: the weights of a
    layer that looks at pictures.

    >>> tile_shape((16, 3, 5, 5)), tile_shape((10, 784)), tile_shape((10, 7))
    ((48, 5, 5), (10, 28, 28), None)
    """
    if len(shape) >= 3:
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    if len(shape) == 2 and math.isqrt(shape[1]) ** 2 == shape[1] > 1:
        return shape[0], math.isqrt(shape[1]), math.isqrt(shape[1])
    return None


def arrange(tiles: int, rows: int, columns: int, box: Box, row: int = 0) -> tuple[int, int]:
    """How many tiles stand side by side and one above the other; `row` is a natural number of them.

    >>> arrange(64, 5, 5, Box(0, 0, 500, 400))
    (8, 8)
    """
    best, found = 0.0, (1, 1)
    for across in range(1, tiles + 1):
        down = math.ceil(tiles / across)
        side = min(box.width / (across * columns), box.height / (down * rows))
        # whole rows of channels are worth a little room
        worth = side * (1.25 if row and across % row == 0 else 1.0)
        if worth > best:
            best, found = worth, (across, down)
    return found


class GridPicture:
    """Tiles with one range of colours."""

    aside = ""

    def __init__(self, style: Style, at: Measures) -> None:
        self._style, self._at = style, at
        self.shades = Shades(style)
        self.note = ""
        self._tiles: list[tuple[int, Box]] = []
        self._shape: tuple[int, ...] = ()
        self._all = self._bar = Box(0, 0, 1, 1)

    def see(self, look: Look) -> object:
        """What the still part of the frame depends on."""
        self.shades.see(look.summary)
        if look.inner != self._shape:
            self._shape = look.inner
            self._place(look.inner)
        return self.shades.symmetric

    def _room(self) -> Box:
        room = self._at.room(self._style.size)
        return room._replace(right=room.right - bar_width(self._at))

    def _shown(self, count: int, rows: int, columns: int) -> int:
        room = self._room()
        longer = max(rows, columns)
        wide = max(4, _SMALLEST * columns // longer) + 1
        high = max(4, _SMALLEST * rows // longer) + 1
        return min(count, max(1, room.width // wide) * max(1, room.height // high))

    def _place(self, shape: tuple[int, ...]) -> None:
        """Where the tiles are."""
        found = tile_shape(shape)
        assert found is not None
        count, rows, columns = found
        shown = self._shown(count, rows, columns)
        room = self._room()
        row = shape[1] if len(shape) == 4 and shown == count else 0
        across, down = arrange(shown, rows, columns, room, row)
        side = min(room.width / (across * columns), room.height / (down * rows))
        gap = max(1, round(min(side * columns, side * rows) * 0.06))
        wide, high = max(1, int(side * columns) - gap), max(1, int(side * rows) - gap)
        if wide >= columns and high >= rows:  # as many pixels for each cell
            whole = max(1, min(wide // columns, high // rows))
            if whole * columns >= 0.8 * wide:
                wide, high = whole * columns, whole * rows
        left = room.left + (room.width - across * (wide + gap) + gap) // 2
        top = room.top + (room.height - down * (high + gap) + gap) // 2
        self._tiles = []
        for i in range(shown):
            x, y = left + i % across * (wide + gap), top + i // across * (high + gap)
            # evenly chosen where not all have room
            self._tiles.append((i * count // shown, Box(x, y, x + wide, y + high)))
        bottom, right = top + down * (high + gap) - gap, left + across * (wide + gap) - gap
        self._all = Box(left, top, right, bottom)
        many = f"{shown:,} of {count:,}" if shown < count else f"{count:,}"
        less = shrunk((rows, columns), (high, wide), "a pixel")
        self.note = " · ".join(filter(None, (f"{many} tiles of {rows}x{columns}", less)))

    def still(self, canvas: Canvas, box: Box, look: Look) -> None:
        """The colour bar."""
        if self._at.header:
            end = min(box.right, self._all.right + bar_width(self._at) + self._at.small)
            bar = self._all._replace(right=end)
            self._bar = color_bar(canvas, self._at, bar, self.shades.pixels)

    def draw(self, canvas: Canvas, box: Box, look: Look) -> None:
        """The tiles of this frame."""
        import numpy as np

        found = tile_shape(look.inner)
        assert found is not None
        assert look.array is not None
        tiles: NDArray[Any] = look.array.reshape(found)
        summary = look.summary
        finite = summary is not None and summary.finite == summary.count
        shown = [index for index, _ in self._tiles]
        first = self._tiles[0][1]
        if found[1] <= first.height and found[2] <= first.width:
            # every cell has its pixels: the colours of all tiles at once
            pixels = self.shades.pixels[indices(reals(tiles[shown]), self.shades.limits, finite)]
            pixels = pixels.take(np.arange(first.height) * found[1] // first.height, axis=1)
            pixels = pixels.take(np.arange(first.width) * found[2] // first.width, axis=2)
            for (_, at), tile in zip(self._tiles, pixels, strict=True):
                canvas.pixels[at.top : at.bottom, at.left : at.right] = tile
        else:
            for index, at in self._tiles:
                paint(canvas, at, tiles[index], self.shades, finite)
        if self._at.header:
            bar_ticks(canvas, self._style, self._at, self._bar, self.shades.limits)
