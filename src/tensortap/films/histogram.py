"""The histogram of a tensor; that of the first frame stays as a thin line."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.films.canvas import Canvas
from tensortap.films.legend import draw_plot_axes
from tensortap.films.picture import FrameContent, Picture
from tensortap.films.scales import RangeFollower, Ticks, as_shares, ticks
from tensortap.films.style import Box, FrameLayout, Style
from tensortap.record import Summary
from tensortap.text.tensors import number
from tensortap.viz.reals import Range, counts_of

_LINE = 1.6  # the line of the first frame may be so many times as high as the highest bar


class HistogramPicture(Picture):
    """Bars of counts; for statistics without values, of exponents."""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        super().__init__(style, layout)
        self._across, self._up = RangeFollower(style.range), RangeFollower("follow")
        self._limits: Range = (0.0, 1.0)
        self._first: tuple[Range, NDArray[Any], int] | None = None  # limits, density, step
        self._bins_seen: tuple[int, int] | None = None

    def prepare(self, content: FrameContent) -> None:
        """Adapt the range; nothing is still, because both axes move."""
        only_statistics = content.array is None
        self.note = "counts of exponents" if only_statistics else ""
        self.aside = "" if self._first is None else f"line: step {self._first[2]:,}"
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
        self._draw_bars(canvas, plot, counts, across, content.record.step)

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

    def _draw_bars(
        self, canvas: Canvas, plot: Box, counts: NDArray[Any], across: Ticks, step: int
    ) -> None:
        line = self._first_frame(counts, step)
        highest = float(counts.max(initial=0))
        if line is not None:
            highest = max(highest, min(float(line.max(initial=0)), highest * _LINE))
        top = self._up.next(0.0, max(1.0, highest * 1.06))[1]
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
        if line is not None:
            self._draw_outline(canvas, plot, line / top * (plot.height - 1))

    def _first_frame(self, counts: NDArray[Any], step: int) -> NDArray[Any] | None:
        """Return the counts of the first frame, scaled to the bins and the number of values now."""
        total = max(1, int(counts.sum()))
        width = (self._limits[1] - self._limits[0]) / len(counts)
        if self._first is None:
            if counts.any():
                self._first = self._limits, counts / (total * width), step
            return None
        scaled: NDArray[Any] = self._first[1] * width * total
        return scaled

    def _draw_outline(self, canvas: Canvas, plot: Box, heights: NDArray[Any]) -> None:
        """Draw the first frame as a stepped line, which leaves the plot where it is too high."""
        assert self._first is not None
        start, end = self._limits
        edges = np.linspace(*self._first[0], len(heights) + 1)
        xs = plot.left + (edges - start) / (end - start) * plot.width
        if not np.isfinite(xs).all():
            return
        across = np.rint(xs.clip(plot.left, plot.right)).astype(int).tolist()
        ys = plot.bottom - heights.clip(0, plot.height + 1) - 1
        ink, before = self._layout.colors.dim, plot.bottom - 1
        for left, right, y in zip(
            across[:-1], across[1:], np.rint(ys).astype(int).tolist(), strict=True
        ):
            if left < right:
                upper, lower = max(min(before, y), plot.top), max(before, y)
                canvas.fill(left, upper, left + 1, lower + 1, ink)
                if y >= plot.top:
                    canvas.fill(left, y, right, y + 1, ink)
                before = y
