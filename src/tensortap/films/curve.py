"""A number as a curve over the steps."""

from __future__ import annotations

import math

import numpy as np

from tensortap.films.canvas import Canvas
from tensortap.films.legend import draw_plot_axes
from tensortap.films.picture import FrameContent, Picture
from tensortap.films.scales import RangeFollower, as_shares, ticks
from tensortap.films.style import FrameLayout, Style
from tensortap.viz.colors import NAN_COLOR, NEGINF_COLOR, POSINF_COLOR
from tensortap.viz.reals import reals

_MAX_POINTS = 20_000  # beyond, every other point is dropped


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
