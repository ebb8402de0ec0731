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

from tensortap.rooms.figures.reals import shares_of, shrink
from tensortap.rooms.films.canvas import Canvas, draw_color_bar
from tensortap.rooms.films.pictures import (
    ColorScale,
    FrameContent,
    Picture,
    color_indices,
    shrink_note,
)
from tensortap.rooms.films.style import NAN, STEPS, Box, FrameLayout, Rgb, Style, mixed, packed

Array = NDArray[Any]

_POINTS = 256  # along each side: more are shrunk, fewer are interpolated
_TURN, _TILT = math.radians(30), math.radians(34)
_TALL = 0.40  # height of the range on the screen, relative to a side of the ground


class SurfacePicture(Picture):
    """A matrix as heights over its rows and columns."""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        super().__init__(style, layout)
        self.scale = ColorScale(style)
        box = layout.room
        self._view = SurfaceView(box._replace(right=box.right - layout.bar_width))
        self._empty: NDArray[np.uint32] | None = None  # a frame without the surface

    def draw(self, canvas: Canvas, content: FrameContent) -> None:
        self.scale.update(content.summary)
        self.note = shrink_note(content.inner, (_POINTS, _POINTS), "point")
        layout, box, theme = self._layout, self._layout.room, self._layout.colors
        if self._empty is None:
            draw_edges(canvas, self._view, theme.line)
            self._empty = canvas.pixels.copy()
        canvas.pixels[:] = self._empty
        cells = shrink(content.reshaped(content.inner), _POINTS, _POINTS, self.scale.middle)
        heights, colors = surface_of(cells, self.scale, content.is_finite)
        drawn = self._view.draw(heights, colors, mixed(theme.line, theme.dim, 0.15))
        area = self._view.area
        under = canvas.pixels[area.top : area.bottom, area.left : area.right]
        under[:] = np.where(drawn, drawn, under)
        high = round(box.height * 0.12)
        bar = Box(box.left, box.top + high, box.right, box.bottom - high // 2)
        draw_color_bar(canvas, layout, bar, self.scale.pixels, self.scale.limits)


def surface_of(cells: Array, scale: ColorScale, finite: bool) -> tuple[Array, NDArray[np.uint32]]:
    """Return heights from 0 to 1 and pixels, at every point of the grid."""
    codes = color_indices(cells, scale.limits, finite)
    # NaN and Inf are spikes, because a pit could be hidden
    share = shares_of(np.where(codes >= NAN, scale.limits[1], cells), scale.limits)
    share = _interpolated(_interpolated(share.astype(np.float32)).T).T
    index = np.rint(share * (STEPS - 1)).astype(np.uint8)
    light = _light(share)
    if not finite:
        y, x = (np.rint(np.linspace(0, n - 1, _POINTS)).astype(int) for n in codes.shape)
        bad = _widened(np.where(codes >= NAN, codes, 0)[y[:, None], x])
        index, light = np.where(bad, bad, index), np.where(bad, 1, light)
    # every color in 64 lights from 0.475 in steps of 1/80: faster than arithmetic per point
    rgb = scale.pixels.view(np.uint8).reshape(-1, 4)[:, None, :3]
    lit = packed((rgb * (0.475 + np.arange(64)[:, None] / 80)).clip(0, 255).astype(np.uint8))
    return share, lit.take(index * np.int32(64) + np.rint((light - 0.475) * 80).astype(np.int32))


def _light(share: Array) -> Array:
    """Return by how much the light from the upper left changes the color of every point."""
    slope = np.zeros_like(share)
    slope[:, 1:] += share[:, 1:] - share[:, :-1]
    slope[1:] += share[1:] - share[:-1]
    slope *= _POINTS * _TALL
    # noise has steep slopes: full light would make it black and white and hide its colors
    rough = math.sqrt(float(np.square(slope).mean()))
    if rough > 0.9:
        slope *= (0.9 / rough) ** 1.25
    light: Array = 0.87 + 0.3 * slope / np.sqrt(1 + slope * slope)
    lines = np.arange(_POINTS) % round(_POINTS / 12) == 0
    light[lines[:, None] | lines] -= 0.084
    return light


def _widened(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Extend codes to neighboring points: a single point would hardly be visible."""
    for axis in (0, 1):
        near = np.pad(codes, [(1, 1) if each == axis else (0, 0) for each in (0, 1)])
        codes = np.max([np.take(near, range(k, k + _POINTS), axis) for k in range(3)], axis=0)
    return codes


def _interpolated(values: Array) -> Array:
    """Return the points of the grid along the first axis, linearly between values."""
    if len(values) == _POINTS:
        return values
    at = np.linspace(0, len(values) - 1, _POINTS)
    first = np.minimum(at.astype(int), max(len(values) - 2, 0))
    rest = (at - first).astype(np.float32)[:, None]
    between: Array = values[first]
    between += (values[np.minimum(first + 1, len(values) - 1)] - between) * rest
    return between


class SurfaceView:
    """The grid in some room: everything that does not depend on values."""

    def __init__(self, room: Box) -> None:
        self._across = across = math.cos(_TURN) + math.sin(_TURN)
        tilt = math.sin(_TILT)
        self._scale = scale = 0.985 * min(
            room.width / across, room.height / (across * tilt + _TALL)
        )
        width, height = max(2, int(scale * across)), max(2, int(scale * (across * tilt + _TALL)))
        self.area = room.centered(width, height)
        depth = max(2, int(scale * across * tilt))
        x = (np.arange(width) + 0.5) / width * across - across / 2
        # the first sample lies in front of the ground
        away = (np.arange(-1, depth) + 0.5) / depth * across - across / 2
        # where on the ground each sample is, in shares of a side
        a = x[None, :] * math.cos(_TURN) + away[:, None] * math.sin(_TURN) + 0.5
        b = x[None, :] * math.sin(_TURN) - away[:, None] * math.cos(_TURN) + 0.5
        inside = (a >= 0) & (a <= 1) & (b >= 0) & (b <= 1)
        self._columns = np.arange(width, dtype=np.int32)
        ground = (away + across / 2) * scale * tilt
        first = inside.argmax(axis=0)
        self._front = np.rint(ground[first]).clip(0).astype(np.int32)
        # far below the screen where there is no ground
        self._ground = np.where(inside, ground[:, None], -1e6).astype(np.float32)
        # the point that each sample shows; beside the points there are a wall, and nothing
        wall, nothing = _POINTS**2, _POINTS**2 + 1
        point = np.rint(b * (_POINTS - 1)) * _POINTS + np.rint(a * (_POINTS - 1))
        codes = np.where(inside, point, nothing).astype(int)
        self._point = np.where(inside, codes, 0)
        touched = inside.any(axis=0)
        codes[first[touched], self._columns[touched]] = wall
        self._codes = np.concatenate([codes, np.full((1, width), nothing)]).reshape(-1)

    def draw(self, heights: Array, colors: NDArray[np.uint32], wall: Rgb) -> NDArray[np.uint32]:
        """Return the pixels of the area; 0 where there is no surface."""
        reach = heights.reshape(-1).take(self._point)
        reach *= self._scale * _TALL
        reach += self._ground
        # up to which row of pixels each sample and those in front of it reach
        for front, row in itertools.pairwise(reach):  # three times as fast as accumulate
            np.maximum(front, row, out=row)
        level = reach.astype(np.int32)
        width, top = self.area.width, self.area.height
        level = level.clip(self._front, top, out=level)
        level *= width
        level += self._columns
        # how many samples end below a pixel: the next one is visible there
        sample = np.bincount(level.reshape(-1), minlength=(top + 1) * width)[: top * width]
        sample = sample.reshape(top, width)
        sample *= width
        sample[0] += self._columns
        np.cumsum(sample, axis=0, out=sample)
        palette = np.concatenate([colors.reshape(-1), packed([wall]), np.zeros(1, np.uint32)])
        return palette.take(self._codes.take(sample))[::-1]

    def on_screen(self, a: float, b: float, z: float) -> tuple[float, float]:
        """Return the pixel of a point: columns, rows and height from 0 to 1."""
        a, b = a - 0.5, b - 0.5
        x = a * math.cos(_TURN) + b * math.sin(_TURN) + self._across / 2
        away = a * math.sin(_TURN) - b * math.cos(_TURN) + self._across / 2
        up = (away * math.sin(_TILT) + z * _TALL) * self._scale
        return self.area.left + x * self._scale, self.area.bottom - up


def draw_edges(canvas: Canvas, view: SurfaceView, color: Rgb) -> None:
    """Draw the edges of the ground and of the two walls behind the surface."""
    ground = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 0)]
    behind = [(0, 0, 0), (0, 0, 1), (1, 0, 1), (1, 0, 0)]
    beside = [(1, 0, 1), (1, 1, 1), (1, 1, 0)]
    for corners in (ground, behind, beside):
        xs, ys = zip(*(view.on_screen(*corner) for corner in corners), strict=True)
        canvas.curve(xs, ys, 1.0, color)
