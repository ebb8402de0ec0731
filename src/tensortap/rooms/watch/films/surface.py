"""A matrix as a landscape.

The direction of view is fixed, so that every column of the screen is a line over the matrix, from
front to back. Along it the highest point so far hides lower ones behind it: a running maximum tells
how far up each sample reaches, and the number of samples below a pixel tells which one it shows.
No triangles and no sorting, only a few passes over small arrays.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.rooms.figures.colors import NAN, Rgb, mixed, packed
from tensortap.rooms.figures.reals import shares_of, shrink
from tensortap.rooms.watch.films.canvas import Canvas
from tensortap.rooms.watch.films.images import shrink_note
from tensortap.rooms.watch.films.legend import draw_color_bar
from tensortap.rooms.watch.films.picture import ColorScale, FrameContent, Picture, color_indices
from tensortap.rooms.watch.films.style import Box, FrameLayout, Style

Array = NDArray[Any]

_TURN = math.radians(30)
_TILT = math.radians(34)
_TALL = 0.40  # height of the range on the screen, relative to a side of the ground
_FINEST, _COARSEST = 256, 96  # points along a side: more are shrunk, fewer are interpolated
_LIGHTS = 64  # levels of light: fewer would show as rings on a smooth surface
_DARKEST, _BRIGHTEST = 0.32, 1.16  # light on slopes that face away and towards it
_FINER = 2  # samples per pixel, one above the other, for smooth ridges
_ROUGH = 0.9  # mean slope above which light is softened
_LINES = 12  # lines along each side of the surface


class SurfacePicture(Picture):
    """A matrix as heights over its rows and columns."""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        super().__init__(style, layout)
        self.scale = ColorScale(style)
        self._view: SurfaceView | None = None
        self._empty: NDArray[np.uint32] | None = None  # a frame without the surface

    def draw(self, canvas: Canvas, content: FrameContent) -> None:
        """Draw the surface, the edges around it and the color bar."""
        self.scale.update(content.summary)
        self.note = shrink_note(content.inner, (_FINEST, _FINEST), "point")
        layout, box, theme = self._layout, self._layout.room, self._layout.colors
        if self._view is None or (self._view.rows, self._view.columns) != content.inner:
            room = box._replace(right=box.right - layout.bar_width)
            rows, columns = content.inner
            self._view = SurfaceView(rows, columns, room)
            draw_edges(canvas, self._view, theme.line)
            self._empty = canvas.pixels.copy()
        elif self._empty is not None:
            canvas.pixels[:] = self._empty
        walls = mixed(theme.line, theme.background, 0.3), mixed(theme.line, theme.dim, 0.15)
        lit = lit_colors(self.scale.pixels, walls)
        cells = shrink(content.reshaped(content.inner), _FINEST, _FINEST, self.scale.middle)
        drawn = self._view.draw(cells, self.scale, content.is_finite, lit)
        area = self._view.area
        under = canvas.pixels[area.top : area.bottom, area.left : area.right]
        under[:] = drawn_over(under, drawn)
        high = round(box.height * 0.12)
        bar = Box(box.left, box.top + high, box.right, box.bottom - high // 2)
        draw_color_bar(canvas, layout, bar, self.scale.pixels, self.scale.limits)


def lit_colors(pixels: NDArray[np.uint32], walls: tuple[Rgb, Rgb]) -> NDArray[np.uint32]:
    """Return the colors of a map under each light, then those of both walls and of nothing (0)."""
    rgb = pixels.view(np.uint8).reshape(-1, 4)[:, :3].astype(np.float64)
    light = np.linspace(_DARKEST, _BRIGHTEST, _LIGHTS)[None, :, None]
    lit = (rgb[:, None, :] * light).clip(0, 255)
    lit[NAN:] = rgb[NAN:, None, :]  # light does not change NaN and Inf
    table = packed(np.rint(lit).astype(np.uint8)).reshape(-1)
    return np.concatenate([table, packed(np.array(walls)), np.zeros(1, np.uint32)])


def drawn_over(under: NDArray[np.uint32], drawn: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return pixels in which the average of two half pixels covers what is under them."""
    upper, lower = drawn[0::2], drawn[1::2]
    upper = np.where(upper, upper, under)
    lower = np.where(lower, lower, under)
    half = np.bitwise_xor(upper, lower)
    half &= np.uint32(0xFEFEFEFE)
    half >>= np.uint32(1)
    upper &= lower
    half += upper
    return half


class SurfaceView:
    """A matrix of some shape in some room: everything that does not depend on values."""

    def __init__(self, rows: int, columns: int, room: Box) -> None:
        self.rows, self.columns = rows, columns
        across = abs(math.cos(_TURN)) + abs(math.sin(_TURN))
        tilt = math.sin(_TILT)
        scale = min(room.width / across, room.height / (across * tilt + _TALL)) * 0.985
        width, height = max(2, int(scale * across)), max(2, int(scale * (across * tilt + _TALL)))
        self.area = room.centered(width, height)
        self._scale, self._across = scale, across
        self._rise = scale * _TALL * _FINER
        self._grid = tuple(min(max(n, _COARSEST), _FINEST) for n in (rows, columns))
        depth = max(2, int(scale * across * tilt))
        x = (np.arange(width) + 0.5) / width * across - across / 2
        # the first sample lies in front of the ground
        away = (np.arange(-1, depth) + 0.5) / depth * across - across / 2
        # where on the ground each sample is, in shares of a side
        a = x[None, :] * math.cos(_TURN) + away[:, None] * math.sin(_TURN) + 0.5
        b = x[None, :] * math.sin(_TURN) - away[:, None] * math.cos(_TURN) + 0.5
        inside = (a >= 0) & (a <= 1) & (b >= 0) & (b <= 1)
        a, b = a.clip(0, 1), b.clip(0, 1)
        self._find_corners(a, b, inside)
        ground = (away + across / 2) * scale * tilt * _FINER
        self._ground = np.broadcast_to(ground[:, None], inside.shape)[inside].astype(np.float32)
        self._reach = np.empty(inside.shape, np.float32)
        self._lanes = list(self._reach)
        front = inside.argmax(axis=0)
        self._front = np.rint(ground[front]).clip(0).astype(np.int32)
        self._choose_codes(a, b, inside, front)
        self._columns = np.arange(width, dtype=np.int32)

    def _find_corners(self, a: Array, b: Array, inside: Array) -> None:
        """Find the four points of the matrix around each sample, and their weights."""
        rows, columns = self._grid
        y, x = b * (rows - 1), a * (columns - 1)
        i = np.minimum(y.astype(np.int64), rows - 2)
        j = np.minimum(x.astype(np.int64), columns - 2)
        self._at = np.flatnonzero(inside)
        self._place = (i * columns + j)[inside].astype(np.intp)
        self._right = (x - j)[inside].astype(np.float32)
        self._down = (y - i)[inside].astype(np.float32)

    def _choose_codes(self, a: Array, b: Array, inside: Array, front: Array) -> None:
        """Choose whose color each sample has: a point of the matrix, a wall, or nothing."""
        rows, columns = self._grid
        width = inside.shape[1]
        y = np.rint(b * (rows - 1)).astype(np.int32)
        x = np.rint(a * (columns - 1)).astype(np.int32)
        nothing = rows * columns + 2
        codes = np.where(inside, y * columns + x, nothing)
        touched = inside.any(axis=0)
        across = np.arange(width)
        # the wall along the rows is left of the front corner, that along the columns right of it
        corner = (0.5 * (math.sin(_TURN) - math.cos(_TURN)) / self._across + 0.5) * width
        wall = np.where(across < corner, rows * columns, rows * columns + 1)
        codes[front[touched], across[touched]] = wall[touched]
        behind = np.full((1, width), nothing)
        self._seen = np.ascontiguousarray(np.concatenate([codes, behind]).astype(np.intp))
        lines_y, lines_x = (
            np.arange(n) % max(1, round((n - 1) / _LINES)) == 0 for n in (rows, columns)
        )
        self._lines = (lines_y[:, None] | lines_x[None, :]) * np.float32(0.1 * _LIGHTS)

    def draw(
        self, cells: Array, scale: ColorScale, finite: bool, lit: NDArray[np.uint32]
    ) -> NDArray[np.uint32]:
        """Return the surface in half pixels, twice as high as the area; 0 where there is none."""
        heights, colors = self._heights(cells, scale, finite, lit)
        columns = heights.shape[1]
        flat = heights.reshape(-1)
        # bilinear: between the two points above, between the two below, between both
        near = flat.take(self._place)
        near += (flat[1:].take(self._place) - near) * self._right
        far = flat[columns:].take(self._place)
        far += (flat[columns + 1 :].take(self._place) - far) * self._right
        far -= near
        far *= self._down
        near += far
        near *= self._rise
        near += self._ground
        reach = self._reach
        reach.fill(-1)
        reach.reshape(-1)[self._at] = near
        # row by row: three times as fast as one call that goes down column by column
        for before, row in itertools.pairwise(self._lanes):
            np.maximum(before, row, out=row)
        # up to which row of pixels each sample and those in front of it reach
        level = reach.astype(np.int32)
        np.maximum(level, self._front, out=level)
        width, top = self.area.width, self.area.height * _FINER
        np.minimum(level, top, out=level)
        level *= width
        level += self._columns
        below = np.bincount(level.reshape(-1), minlength=(top + 1) * width)
        # how many samples end below a pixel: the next one is visible there
        sample = below[: top * width].reshape(top, width)
        sample *= width
        sample[0] += self._columns
        np.cumsum(sample, axis=0, out=sample)
        return colors.take(self._seen).reshape(-1).take(sample, mode="clip")[::-1]

    def _heights(
        self, cells: Array, scale: ColorScale, finite: bool, lit: NDArray[np.uint32]
    ) -> tuple[Array, NDArray[np.uint32]]:
        """Return heights from 0 to 1 and colors, at every point of the grid."""
        rows, columns = self._grid
        codes = None
        if not finite:
            codes = color_indices(cells, scale.limits, finite=False)
            # a spike, because a pit could be hidden
            cells = np.where(codes >= NAN, scale.limits[1], cells)
        share = shares_of(cells, scale.limits).astype(np.float32, copy=False)
        share = _interpolated(_interpolated(share, rows).T, columns).T
        light = self._light(share)
        place = (share * np.float32(NAN - 1)).astype(np.int32)
        if codes is not None:
            y = np.rint(np.linspace(0, codes.shape[0] - 1, rows)).astype(np.int64)
            x = np.rint(np.linspace(0, codes.shape[1] - 1, columns)).astype(np.int64)
            bad = _widened(codes[y[:, None], x[None, :]])
            place = np.where(bad >= NAN, bad, place).astype(np.int32)
        place *= _LIGHTS
        place += light.astype(np.int32)
        return share, np.concatenate([lit.take(place.reshape(-1)), lit[-3:]])

    def _light(self, share: Array) -> Array:
        """Return the level of light at every point, from the upper left."""
        rows, columns = self._grid
        slope = np.zeros_like(share)
        slope[:, 1:] += share[:, 1:] - share[:, :-1]
        slope *= columns / rows
        slope[1:] += share[1:] - share[:-1]
        slope *= rows * _TALL
        # noise has steep slopes: full light would make it black and white and hide its colors
        rough = math.sqrt(float(np.dot(slope.reshape(-1), slope.reshape(-1))) / slope.size)
        if rough > _ROUGH:
            slope *= (_ROUGH / rough) ** 1.25
        light: Array = slope / np.sqrt(1 + slope * slope)
        light *= 0.5 * (_LIGHTS - 1) * 0.72
        light += 0.66 * (_LIGHTS - 1)
        light -= self._lines
        return np.clip(light, 0, _LIGHTS - 1, out=light)

    def on_screen(self, a: float, b: float, z: float) -> tuple[float, float]:
        """Return the pixel of a point: columns, rows and height from 0 to 1."""
        a, b = a - 0.5, b - 0.5
        x = a * math.cos(_TURN) + b * math.sin(_TURN) + self._across / 2
        away = a * math.sin(_TURN) - b * math.cos(_TURN) + self._across / 2
        up = away * self._scale * math.sin(_TILT) + z * self._rise / _FINER
        return self.area.left + x * self._scale, self.area.bottom - up


def _widened(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Extend NaN and Inf to neighboring points: a single point would hardly be visible."""
    bad = np.where(codes >= NAN, codes, 0).astype(np.uint8)
    for axis in (0, 1):
        near = np.swapaxes(bad.copy(), 0, axis)
        wide = np.swapaxes(bad, 0, axis)
        np.maximum(wide[1:], near[:-1], out=wide[1:])
        np.maximum(wide[:-1], near[1:], out=wide[:-1])
    return bad


def _interpolated(values: Array, points: int) -> Array:
    """Return so many points along the first axis, linearly between values."""
    cells = len(values)
    if cells == points:
        return values
    at = np.linspace(0, cells - 1, points)
    first = np.minimum(at.astype(np.int64), max(cells - 2, 0))
    rest = (at - first).astype(np.float32)[:, None]
    between: Array = values[first]
    between += (values[np.minimum(first + 1, cells - 1)] - between) * rest
    return between


def draw_edges(canvas: Canvas, view: SurfaceView, color: Rgb) -> None:
    """Draw the edges of the ground and of the two walls behind the surface."""
    ground = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 0)]
    behind = [(0, 0, 0), (0, 0, 1), (1, 0, 1), (1, 0, 0)]
    beside = [(1, 0, 1), (1, 1, 1), (1, 1, 0)]
    for corners in (ground, behind, beside):
        xs, ys = zip(*(view.on_screen(*corner) for corner in corners), strict=True)
        canvas.curve(xs, ys, 1.0, color)
