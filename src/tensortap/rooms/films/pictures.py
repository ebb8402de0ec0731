"""The content of a frame, and pictures of it: the base class, images and histograms."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Record, Summary, TensorData
from tensortap.rooms.figures.reals import Range, counts_of, shares_of, shrink
from tensortap.rooms.films.canvas import Canvas, draw_cell_axes, draw_color_bar, draw_plot_axes
from tensortap.rooms.films.style import (
    DIVERGING,
    NAN,
    NEGINF,
    POSINF,
    SEQUENTIAL,
    STEPS,
    Box,
    FrameLayout,
    RangeFollower,
    Style,
    Ticks,
    as_shares,
    color_table,
    pixel_table,
    ticks,
)
from tensortap.runs.reader import value_of
from tensortap.stats import summarize_array
from tensortap.stats.conversion import is_number
from tensortap.text.tensors import number
from tensortap.values.view import as_numpy


class FrameContent:
    """A record as a frame shows it; `array` is None if the value has no numbers."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.array, dtype, shape = _array(value_of(record))
        self.dtype = dtype or record.dtype
        self.shape = shape if dtype else record.shape
        self.summary = record.stats
        if self.summary is None and self.array is not None:
            self.summary = summarize_array(self.array)
        self.device = record.tags.get("device", "")
        self.message = record.tags.get("message", "")

    @functools.cached_property
    def inner(self) -> tuple[int, ...]:
        """The shape without its leading ones: ``[1, W, H]`` is a matrix."""
        leading = next((i for i, size in enumerate(self.shape) if size != 1), len(self.shape))
        return self.shape[leading:]

    @property
    def is_finite(self) -> bool:
        """True if all values are known to be finite."""
        return self.summary is not None and self.summary.finite == self.summary.count

    def reshaped(self, shape: tuple[int, ...]) -> NDArray[Any]:
        assert self.array is not None
        return self.array.reshape(shape)


def _array(value: Any) -> tuple[NDArray[Any] | None, str, tuple[int, ...]]:
    """Return the numbers of a value, their dtype and shape."""
    if isinstance(value, TensorData):
        array = as_numpy(value)
        return (array if is_number(array.dtype) else None), value.dtype, value.shape
    if isinstance(value, (bool, int, float)):
        kind = np.bool_ if isinstance(value, bool) else np.float64
        return np.asarray(value, kind), type(value).__name__, ()
    return None, "", ()


class Picture:
    """One way to draw tensors, with its state from frame to frame.

    `note` tells in the heading what is left out.
    """

    note = ""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        self._style, self._layout = style, layout

    def draw(self, canvas: Canvas, content: FrameContent) -> None:
        """Draw the picture on an empty canvas."""
        raise NotImplementedError


class ColorScale:
    """The range and the colors of a film, frame by frame.

    Once both signs have occurred, the range is symmetric and the map diverging. A range that the
    style gives as two numbers stays.
    """

    def __init__(self, style: Style) -> None:
        self._style = style
        rule = style.range
        self._follower = RangeFollower(rule)
        self._decides = isinstance(rule, str)
        self.symmetric = not isinstance(rule, str) and rule[0] == -rule[1]
        self.limits: Range = (0.0, 1.0)
        self._choose_colors()

    def _choose_colors(self) -> None:
        table = color_table(DIVERGING if self.symmetric else SEQUENTIAL)
        self.pixels = pixel_table(table)

    def update(self, summary: Summary | None) -> None:
        """Adapt the range to the next frame."""
        low, high = (math.nan, math.nan) if summary is None else (summary.min, summary.max)
        if self._decides and not self.symmetric and low < 0 < high:
            self.symmetric = True
            self._follower = RangeFollower(self._style.range)
            self._choose_colors()
        self.limits = self._follower.next(low, high, symmetric=self.symmetric)

    @property
    def middle(self) -> float:
        """The middle of the range: shrinking keeps values that are far from it."""
        low, high = self.limits
        return low / 2 + high / 2


def color_indices(values: NDArray[Any], limits: Range, finite: bool) -> NDArray[np.uint8]:
    """Return the index of each value's color; `finite` promises that all values are."""
    with np.errstate(all="ignore"):
        share = shares_of(values, limits)
        share *= STEPS - 1
        share += 0.5
        if not finite:
            share[np.isnan(values)] = NAN + 0.5
            share[values == np.inf] = POSINF + 0.5
            share[values == -np.inf] = NEGINF + 0.5
        return share.astype(np.uint8)


def fit(rows: int, columns: int, width: int, height: int) -> tuple[int, int]:
    """Return width and height of a picture: square cells, unless that wastes the room.

    >>> fit(256, 256, 520, 380), fit(10, 10, 520, 385), fit(4, 4000, 520, 380)
    ((380, 380), (380, 380), (520, 380))
    """
    side = min(width / columns, height / rows)
    if side * columns * side * rows < 0.4 * width * height:
        return width, height
    if side >= 1 and int(side) / side >= 0.86:  # a bit smaller, for cells of whole pixels
        side = int(side)
    return max(1, round(side * columns)), max(1, round(side * rows))


class ImagePicture(Picture):
    """A matrix, cell by cell."""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        super().__init__(style, layout)
        self.scale = ColorScale(style)

    def draw(self, canvas: Canvas, content: FrameContent) -> None:
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
        down, across = (
            np.arange(n) * k // n for n, k in zip((height, width), indices.shape, strict=True)
        )
        pixels = self.scale.pixels.take(indices).take(across, axis=1).take(down, axis=0)
        canvas.pixels[box.top : box.bottom, box.left : box.right] = pixels
        if not content.is_finite and (height < 3 * len(cells) or width < 3 * cells.shape[1]):
            reach = 1 + (matrix.shape != cells.shape)  # at least 3 pixels, or 5 if it was shrunk
            _mark_nonfinite(canvas, box, indices, self.scale.pixels, reach)


def shrink_note(shape: tuple[int, ...], cells: tuple[int, int], unit: str) -> str:
    """Return a note if one cell stands for several values."""
    rows, columns = (math.ceil(n / room) for n, room in zip(shape, cells, strict=True))
    return f"up to {rows}x{columns} values per {unit}" if max(rows, columns) > 1 else ""


def _mark_nonfinite(
    canvas: Canvas,
    box: Box,
    indices: NDArray[np.uint8],
    pixels: NDArray[np.uint32],
    reach: int,
) -> None:
    """Enlarge cells that are not finite: video halves the resolution of colors."""
    rows, columns = np.nonzero(indices >= NAN)
    if len(rows) > 4096:  # so many are visible as they are
        return
    colors = pixels[indices[rows, columns]]
    y = box.top + (2 * rows + 1) * box.height // (2 * indices.shape[0])
    x = box.left + (2 * columns + 1) * box.width // (2 * indices.shape[1])
    for dy in range(-reach, reach + 1):
        for dx in range(-reach, reach + 1):
            down = np.clip(y + dy, box.top, box.bottom - 1)
            across = np.clip(x + dx, box.left, box.right - 1)
            canvas.pixels[down, across] = colors


class HistogramPicture(Picture):
    """Bars of counts."""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        super().__init__(style, layout)
        self._across, self._up = RangeFollower(style.range), RangeFollower("follow")
        self._limits: Range = (0.0, 1.0)

    def draw(self, canvas: Canvas, content: FrameContent) -> None:
        assert content.array is not None
        if content.summary is not None:
            self._limits = self._across.next(content.summary.min, content.summary.max)
        layout = self._layout
        plot = layout.plot_box(layout.room.right - layout.margin // 2)
        bins = self._choose_bins(content.array, plot)
        counts = counts_of(content.array, self._limits, bins)
        wide = layout.most_ticks(plot, across=6)[0]
        across = as_shares(self._limits, ticks(*self._limits, wide))
        self._draw_bars(canvas, plot, counts, across)

    def _choose_bins(self, array: NDArray[Any], plot: Box) -> int:
        """Return more bins for more values; the bars have whole pixels."""
        low, high = self._limits
        wanted = 8 + 8 * math.log2(array.size + 1)
        if array.dtype.kind in "biu" and high - low < wanted:
            # one bar per integer: other bins would show gaps that are not in the values
            self._limits = (math.floor(low) - 0.5, math.ceil(high) + 0.5)
            return round(self._limits[1] - self._limits[0])
        return max(4, min(int(wanted), plot.width // 3, 120))

    def _draw_bars(self, canvas: Canvas, plot: Box, counts: NDArray[Any], across: Ticks) -> None:
        top = self._up.next(0.0, max(1.0, float(counts.max(initial=0)) * 1.06))[1]
        values = [v for v, _ in ticks(0.0, top, self._layout.most_ticks(plot)[1]) if v == int(v)]
        up = as_shares((0.0, top), [(v, number(v)) for v in values])
        draw_plot_axes(canvas, self._layout, plot, across=across, up=up)
        edges = np.rint(np.linspace(plot.left, plot.right, len(counts) + 1)).astype(int).tolist()
        heights = np.rint(counts / top * (plot.height - 1)).astype(int)
        heights[counts > 0] = np.maximum(heights[counts > 0], 1)  # a single value is visible
        gap = 1 if plot.width / len(counts) >= 4 else 0
        for left, right, height in zip(edges[:-1], edges[1:], heights.tolist(), strict=True):
            if height:
                right = max(right - gap, left + 1)
                accent = self._layout.colors.accent
                canvas.fill(left, plot.bottom - height, right, plot.bottom, accent)
