"""Plots: a number as a curve over the steps, and the histogram of a tensor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Summary
from tensortap.rooms.figures.colors import NAN_COLOR, NEGINF_COLOR, POSINF_COLOR
from tensortap.rooms.figures.reals import Range, counts_of, reals
from tensortap.rooms.watch.films.canvas import Canvas
from tensortap.rooms.watch.films.legend import draw_plot_axes
from tensortap.rooms.watch.films.picture import FrameContent, Picture
from tensortap.rooms.watch.films.style import (
    Box,
    FrameLayout,
    RangeFollower,
    Style,
    Ticks,
    as_shares,
    ticks,
)
from tensortap.text.tensors import number

_MAX_POINTS = 20_000  # of a curve; beyond, every other point is dropped


class CurvePicture(Picture):
    """All numbers of a film so far."""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        super().__init__(style, layout)
        self._follower = RangeFollower(style.range)
        self._points: list[tuple[int, float]] = []
        self._every, self._seen = 1, 0
        self._latest = 0, 0.0

    def prepare(self, content: FrameContent) -> None:
        """Add a point; nothing is still, because both axes move."""
        self._latest = content.record.step, float(reals(content.reshaped((1,)))[0])
        if self._seen % self._every == 0 or not math.isfinite(self._latest[1]):
            self._points.append(self._latest)
        self._seen += 1
        if len(self._points) > _MAX_POINTS:
            self._every *= 2
            self._points = self._points[::2]
            self.note = f"every {self._every}th value"

    def draw_moving(self, canvas: Canvas, content: FrameContent) -> None:
        """Draw the curve so far, and its end as a dot."""
        layout = self._layout
        plot = layout.plot_box(layout.room.right - layout.margin // 2)
        points = [*self._points, self._latest]
        values = [value for _, value in points if math.isfinite(value)]
        low, high = self._follower.next(
            min(values, default=math.nan), max(values, default=math.nan)
        )
        pad = (high - low) * 0.05
        low, high = low - pad, high + pad
        first, last = min(step for step, _ in points), max(step for step, _ in points)
        last = max(last, first + 1)
        wide, tall = layout.most_ticks(plot)
        whole = [(v, f"{int(v):,}") for v, _ in ticks(first, last, wide) if v == int(v)]
        up = as_shares((low, high), ticks(low, high, tall))
        draw_plot_axes(canvas, layout, plot, across=as_shares((first, last), whole), up=up)

        def position(step: int, value: float) -> tuple[float, float]:
            share = (min(max(value, low), high) - low) / (high - low)
            x = plot.left + (step - first) / (last - first) * (plot.width - 1)
            return x, plot.bottom - 1 - share * (plot.height - 1)

        # a value that is not finite is a gap with a mark
        piece: list[tuple[float, float]] = []
        for step, value in points:
            if math.isfinite(value):
                piece.append(position(step, value))
                continue
            self._draw_line(canvas, piece)
            piece = []
            color = NAN_COLOR if math.isnan(value) else POSINF_COLOR if value > 0 else NEGINF_COLOR
            x = round(position(step, low)[0])
            canvas.fill(x - 1, plot.top, x + 1, plot.bottom, color)
        self._draw_line(canvas, piece)
        if math.isfinite(self._latest[1]):
            xs, ys = np.array([position(*self._latest)]).T
            ink = np.array([layout.colors.ink], np.uint8)
            canvas.dots(xs, ys, max(3.0, layout.small * 0.35), ink)

    def _draw_line(self, canvas: Canvas, piece: list[tuple[float, float]]) -> None:
        width = max(1.5, self._layout.small * 0.16)
        canvas.curve(
            [x for x, _ in piece], [y for _, y in piece], width, self._layout.colors.accent
        )


class HistogramPicture(Picture):
    """Bars of counts; for statistics without values, of exponents."""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        super().__init__(style, layout)
        self._across, self._up = RangeFollower(style.range), RangeFollower("follow")
        self._limits: Range = (0.0, 1.0)
        self._bins_seen: tuple[int, int] | None = None

    def prepare(self, content: FrameContent) -> None:
        """Adapt the range; nothing is still, because both axes move."""
        only_statistics = content.array is None
        self.note = "counts of exponents" if only_statistics else ""
        if not only_statistics and content.summary is not None:
            self._limits = self._across.next(content.summary.min, content.summary.max)

    def draw_moving(self, canvas: Canvas, content: FrameContent) -> None:
        """Draw the bars."""
        layout = self._layout
        plot = layout.plot_box(layout.room.right - layout.margin // 2)
        if content.array is not None:
            bins = self._choose_bins(content.array, plot)
            counts = counts_of(content.array, self._limits, bins)
            across = as_shares(
                self._limits, ticks(*self._limits, layout.most_ticks(plot, across=6)[0])
            )
        else:
            assert content.summary is not None
            counts, across = self._exponents(content.summary)
        self._draw_bars(canvas, plot, counts, across)

    def _exponents(self, summary: Summary) -> tuple[NDArray[Any], Ticks]:
        """Return counts of all exponents that have occurred so far, so that the axis stays."""
        first, last = summary.first_bin, summary.first_bin + max(1, len(summary.bins))
        if self._bins_seen is not None:
            first, last = min(first, self._bins_seen[0]), max(last, self._bins_seen[1])
        self._bins_seen = first, last
        self._limits = float(first), float(last)
        counts = np.zeros(last - first, np.int64)
        counts[summary.first_bin - first :][: len(summary.bins)] = summary.bins
        every = math.ceil(len(counts) / 10)
        labels = [
            ((i + 0.5) / len(counts), f"2^{first + i}")
            for i in range(len(counts))
            if (first + i) % every == 0
        ]
        return counts, labels

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
