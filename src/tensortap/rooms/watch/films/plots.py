"""Histograms of all values of a tensor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.rooms.figures.reals import Range, counts_of
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


class HistogramPicture(Picture):
    """Bars of counts."""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        super().__init__(style, layout)
        self._across, self._up = RangeFollower(style.range), RangeFollower("follow")
        self._limits: Range = (0.0, 1.0)

    def draw(self, canvas: Canvas, content: FrameContent) -> None:
        """Draw the bars."""
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
