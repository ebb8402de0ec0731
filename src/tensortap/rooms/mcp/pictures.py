"""Figures as PNG without a browser: names by steps, as a heatmap or as lines."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tensortap.core.errors import NotFound
from tensortap.rooms.figures.figures.heatmap import INF, NAN, color_range, heatmap_cells
from tensortap.rooms.figures.figures.theme import statistic_text
from tensortap.rooms.films.canvas import Canvas, fitted
from tensortap.rooms.films.style import ticks
from tensortap.table.table import Table
from tensortap.text.tensors import number

Floats = NDArray[np.float64]
Rgb = tuple[int, int, int]
_WHITE, _INK, _DIM, _LINE = (255, 255, 255), (24, 30, 40), (98, 108, 124), (208, 214, 224)
_NAN, _INF, _NONE = (255, 0, 220), (255, 45, 45), (236, 238, 242)
_MAGNITUDES = "310047 43337c 1f689d 009d90 5ac576 c7e03e fff467"  # also readable in gray
_LINES = "0072b2 d55e00 009e73 cc79a7 56b4e9 e69f00 6a3d9a 444444"  # for color-blind people, too
_LEFT, _TOP, _RIGHT, _TEXT = 220, 44, 800, 13  # pixels; the box between them


def draw(
    table: Table, kind: str, statistic: str, names: Sequence[str], inc: int, *, is_map: bool
) -> bytes:
    """Return a PNG of a statistic of some names over steps, `inc` steps per point.

    A point is the most notable record of its steps. NaN and Inf have colors of their own.
    """
    cells = heatmap_cells(table, kind, statistic, inc, names, None)
    if cells is None:
        raise NotFound(f"no {statistic} of {kind}")
    logarithmic, shade, (low, high) = color_range(cells.value, None)
    if not is_map:  # colors leave out the farthest values, lines do not
        drawn = np.isfinite(cells.value) & ~(logarithmic & (cells.value <= 0))
        shade = np.where(drawn, shade, np.nan)
        low, high = np.nanmin([low, *shade.flat]), np.nanmax([high, *shade.flat])
    share = (shade - low) / (high - low)
    rows, columns = share.shape
    height = max(160, 20 * rows) if is_map else 320
    bottom = _TOP + height
    canvas = Canvas(900, bottom + 30, _WHITE)
    canvas.text(16, 20, fitted(f"{statistic_text(statistic)} of {kind}", 16, 700), 16, _INK)
    for value, words in ticks(low, high, 6):
        y = bottom - (value - low) / (high - low) * height
        canvas.fill(_LEFT, round(y), _RIGHT + 26, round(y) + 1, _LINE)
        canvas.text(_RIGHT + 30, y, number(10.0**value, 2) if logarithmic else words, _TEXT, _DIM)
    middles = _LEFT + (np.arange(columns) + 0.5) * (_RIGHT - _LEFT) / columns
    for column in sorted({0, columns // 2, columns - 1}):
        words = f"step {cells.steps[column]:,}"
        canvas.text(middles[column], bottom + 14, words, _TEXT, _DIM, "middle")
    for index, name in enumerate(cells.layers):
        color = _INK if is_map else _rgb(_LINES)[index]
        y = _TOP + (index + 0.5) * height / rows
        canvas.text(_LEFT - 8, y, fitted(name, _TEXT, _LEFT - 16), _TEXT, color, "right")
    for code, color, word, x in ((NAN, _NAN, "NaN", 0), (INF, _INF, "Inf", 40)):
        if (cells.bad == code).any():
            canvas.text(_RIGHT - 70 + x, 20, word, _TEXT, color)
    if is_map:
        colors = _colors(share)
        colors[cells.layer < 0] = _NONE
        colors[cells.bad == INF] = _INF
        colors[cells.bad == NAN] = _NAN
        down, across = np.arange(height) * rows // height, np.arange(_RIGHT - _LEFT)
        box = colors[down[:, None], across * columns // len(across)]
        canvas.bytes[_TOP:bottom, _LEFT:_RIGHT, :3] = box
        scale = _colors(np.linspace(1, 0, height)[:, None])
        canvas.bytes[_TOP:bottom, _RIGHT + 10 : _RIGHT + 24, :3] = scale
        return _png(canvas, 256)
    heights = bottom - share * height
    for line, color in zip(heights, _rgb(_LINES), strict=False):
        known = np.isfinite(line)
        for part in np.split(np.arange(columns), np.flatnonzero(~known)):
            at = part[known[part]]  # a gap stays a gap
            canvas.curve(middles[at].tolist(), line[at].tolist(), 1.6, color)
            canvas.dots(middles[at], line[at], 2.0, np.full((len(at), 3), color, np.uint8))
    for code, color in ((INF, _INF), (NAN, _NAN)):
        row, column = np.nonzero(cells.bad == code)
        y = np.nan_to_num(heights[row, column], nan=bottom - 4.0)
        canvas.dots(middles[column], y, 3.0, np.full((len(y), 3), color, np.uint8))
    return _png(canvas, 16)


def _rgb(colors: str) -> list[Rgb]:
    return [(each[0], each[1], each[2]) for each in map(bytes.fromhex, colors.split())]


def _colors(share: Floats) -> NDArray[np.uint8]:
    """Return the color of each share of the range."""
    anchors = np.array(_rgb(_MAGNITUDES), np.float64)
    at, share = np.linspace(0, 1, len(anchors)), np.clip(np.nan_to_num(share), 0, 1)
    mixed = [np.rint(np.interp(share, at, part)).astype(np.uint8) for part in anchors.T]
    return np.stack(mixed, axis=-1)


def _png(canvas: Canvas, colors: int) -> bytes:
    """Return a canvas as PNG. With few colors even lines that cross a lot have 40 kB."""
    file, image = io.BytesIO(), Image.fromarray(canvas.bytes[..., :3])
    image.quantize(colors, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()
