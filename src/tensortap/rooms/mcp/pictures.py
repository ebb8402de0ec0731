"""Figures as PNG without a browser: heatmaps and lines over steps, drawn with Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tensortap.core.errors import NotFound
from tensortap.rooms.figures.figures.encoding import statistic_text
from tensortap.rooms.figures.figures.heatmap import (
    INF,
    NAN,
    color_range,
    heatmap_cells,
    statistic_column,
)
from tensortap.rooms.films.canvas import Canvas, fitted
from tensortap.rooms.films.style import ticks
from tensortap.table.table import Table

Rgb = tuple[int, int, int]
_WHITE, _INK, _DIM, _LINE = (255, 255, 255), (24, 30, 40), (98, 108, 124), (208, 214, 224)
_NAN, _INF, _NONE = (255, 0, 220), (255, 45, 45), (236, 238, 242)
_SIZES = "310047 43337c 1f689d 009d90 5ac576 c7e03e fff467"  # of magnitudes; readable in gray
_LINES = "0072b2 d55e00 009e73 cc79a7 56b4e9 e69f00 6a3d9a 444444"  # told apart by all
_WIDTH, _LEFT, _TOP, _RIGHT, _BOTTOM, _TEXT = 900, 260, 44, 90, 30, 13


def draw_heatmap(
    table: Table, kind: str, statistic: str, names: Sequence[str], inc: int
) -> bytes:  # fmt: skip
    """Return names by steps, `inc` steps per column; NaN and Inf have colors of their own."""
    cells = heatmap_cells(table, kind, statistic, inc, names, None)
    if cells is None:
        raise NotFound(f"no {statistic} of {kind}")
    logarithmic, shade, (low, high) = color_range(cells.value, None)
    rows, columns = cells.value.shape
    room = _WIDTH - _LEFT - _RIGHT, max(160, min(20 * rows, 560))
    canvas = Canvas(_WIDTH, _TOP + room[1] + _BOTTOM, _WHITE)
    _title(canvas, f"{statistic_text(statistic)} of {kind}")
    anchors = np.array([tuple(bytes.fromhex(each)) for each in _SIZES.split()], np.float64)
    share = np.clip(np.nan_to_num((shade - low) / (high - low)), 0, 1)
    colors = _between(anchors, share)
    colors[cells.layer < 0] = _NONE
    colors[cells.bad == INF] = _INF
    colors[cells.bad == NAN] = _NAN
    y, x = (np.arange(room[1]) * rows // room[1], np.arange(room[0]) * columns // room[0])
    canvas.bytes[_TOP : _TOP + room[1], _LEFT : _LEFT + room[0], :3] = colors[y[:, None], x]
    for row, name in enumerate(cells.layers):
        middle = _TOP + (row + 0.5) * room[1] / rows
        canvas.text(_LEFT - 8, middle, fitted(name, _TEXT, _LEFT - 16), _TEXT, _INK, "right")
    for column in sorted({0, columns // 2, columns - 1}):
        middle = _LEFT + (column + 0.5) * room[0] / columns
        _step(canvas, middle, int(cells.steps[column]))
    bar = np.linspace(1, 0, room[1])[:, None]
    left = _LEFT + room[0] + 12
    canvas.bytes[_TOP : _TOP + room[1], left : left + 14, :3] = _between(anchors, bar)
    for value, words in ticks(low, high, 6):
        at = _TOP + (1 - (value - low) / (high - low)) * room[1]
        canvas.text(left + 18, at, f"1e{words}" if logarithmic else words, _TEXT, _DIM)
    for place, (color, word) in enumerate(((_NAN, "NaN"), (_INF, "Inf"))):
        if (cells.bad == (NAN, INF)[place]).any():
            canvas.text(_WIDTH - 100 + 50 * place, 18, word, _TEXT, color)
    return _png(canvas)


def draw_lines(table: Table, kind: str, statistic: str, names: Sequence[str], inc: int) -> bytes:
    """Return one line per name; a logarithmic axis where values span decades."""
    series = []
    for name in names:
        rows = table.series(kind, name)
        series.append((table.step[rows], statistic_column(table, statistic, rows)))
    values = np.concatenate([value for _, value in series])
    steps = np.concatenate([step for step, _ in series])
    if not np.isfinite(values).any():
        raise NotFound(f"no finite {statistic} of {kind}")
    logarithmic, _, _ = color_range(values, None)
    canvas = Canvas(_WIDTH, 420 + 18 * len(names), _WHITE)
    _title(canvas, f"{statistic_text(statistic)} of {kind}")
    left, top, right, bottom = 90, _TOP, _WIDTH - 20, 380
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = [np.log10(value) if logarithmic else value for _, value in series]
    finite = np.concatenate([value[np.isfinite(value)] for value in shown])
    low, high = float(finite.min()), float(finite.max())
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    first, last = int(steps.min()), max(int(steps.max()), int(steps.min()) + 1)
    for value, words in ticks(low, high, 7):
        y = bottom - (value - low) / (high - low) * (bottom - top)
        canvas.fill(left, round(y), right, round(y) + 1, _LINE)
        canvas.text(left - 8, y, f"1e{words}" if logarithmic else words, _TEXT, _DIM, "right")
    for at in (first, (first + last) // 2, last):
        _step(canvas, left + (at - first) / (last - first) * (right - left), at, bottom)
    for number, ((step, raw), value) in enumerate(zip(series, shown, strict=True)):
        red, green, blue = bytes.fromhex(_LINES.split()[number])
        x = left + (step - first) / (last - first) * (right - left)
        y = bottom - (value - low) / (high - low) * (bottom - top)
        good = np.isfinite(y)
        for part in np.split(np.arange(len(y)), np.flatnonzero(~good)):  # a gap is a gap
            part = part[good[part]]
            canvas.curve(x[part].tolist(), y[part].tolist(), 1.6, (red, green, blue))
            canvas.dots(x[part[:1]], y[part[:1]], 2.0, np.array([[red, green, blue]], np.uint8))
        gaps = int((~np.isfinite(raw)).sum())
        words = f"{names[number]}{f'   {gaps:,} not finite' if gaps else ''}"
        where = bottom + 36 + 18 * number
        canvas.fill(left, where - 2, left + 22, where + 1, (red, green, blue))
        canvas.text(left + 30, where, fitted(words, _TEXT, right - left - 30), _TEXT, _INK)
    return _png(canvas)


def _title(canvas: Canvas, words: str) -> None:
    canvas.text(16, 20, fitted(words, 16, _WIDTH - 160), 16, _INK)


def _step(canvas: Canvas, x: float, step: int, bottom: int | None = None) -> None:
    y = (canvas.height - _BOTTOM if bottom is None else bottom) + 14
    canvas.text(x, y, f"step {step:,}", _TEXT, _DIM, "middle")


def _between(anchors: NDArray[np.float64], share: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return colors between anchors."""
    at = np.linspace(0, 1, len(anchors))
    mixed = np.stack([np.interp(share, at, part) for part in anchors.T], axis=-1)
    return np.rint(mixed).astype(np.uint8)


def _png(canvas: Canvas) -> bytes:
    """Return a canvas as PNG of at most 64 colors, which are few bytes."""
    file = io.BytesIO()
    image = Image.fromarray(canvas.bytes[..., :3]).quantize(64, dither=Image.Dither.NONE)
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
