"""A number as a curve over the steps."""

from __future__ import annotations

import math

from tensortap.films.canvas import Canvas
from tensortap.films.legend import plot_axes, shares
from tensortap.films.look import Look
from tensortap.films.scales import Follower, ticks
from tensortap.films.style import Box, Measures, Style
from tensortap.viz.colors import NAN_COLOR, NEGINF_COLOR, POSINF_COLOR
from tensortap.viz.reals import reals

_MOST = 20_000  # points that are kept; then every other one is dropped


class CurvePicture:
    """All numbers of a film so far."""

    note = aside = ""

    def __init__(self, style: Style, at: Measures) -> None:
        self._style, self._at = style, at
        self._follower = Follower(style.range)
        self._points: list[tuple[int, float]] = []
        self._every, self._seen = 1, 0
        self._latest: tuple[int, float] | None = None

    def see(self, look: Look) -> object:
        """What the still part of the frame depends on."""
        assert look.array is not None
        self._latest = look.step, float(reals(look.array).reshape(-1)[0])
        if self._seen % self._every == 0 or not math.isfinite(self._latest[1]):
            self._points.append(self._latest)
        self._seen += 1
        if len(self._points) > _MOST:
            self._every *= 2
            self._points = [p for i, p in enumerate(self._points) if i % 2 == 0]
            self.note = f"every {self._every}th value"
        return None

    def still(self, canvas: Canvas, box: Box, look: Look) -> None:
        """Nothing: both axes move."""

    def draw(self, canvas: Canvas, box: Box, look: Look) -> None:
        """The curve so far, and its end as a dot."""
        import numpy as np

        assert self._latest is not None
        at, colors = self._at, self._style.colors
        beside, below = (round(at.small * 3.8), at.small + 9) if at.header else (0, 0)
        plot = Box(box.left + beside, box.top, box.right - at.margin // 2, box.bottom - below)
        points = [*self._points, self._latest]
        finite = [(s, v) for s, v in points if math.isfinite(v)]
        values = [v for _, v in finite]
        low, high = self._follower.next(
            min(values, default=math.nan), max(values, default=math.nan)
        )
        pad = (high - low) * 0.05
        low, high = low - pad, high + pad
        first, last = float(min(s for s, _ in points)), float(max(s for s, _ in points))
        last = max(last, first + 1)
        across = ticks(first, last, max(2, plot.width // max(50, at.small * 7)))
        whole = [(v, f"{int(v):,}") for v, _ in across if v == int(v)]
        up = ticks(low, high, max(2, plot.height // (at.small * 4 + 12)))
        plot_axes(
            canvas, self._style, at, plot, across=shares((first, last), whole),
            up=shares((low, high), up),
        )  # fmt: skip

        def x_of(step: float) -> float:
            return plot.left + (step - first) / (last - first) * (plot.width - 1)

        def y_of(value: float) -> float:
            return (
                plot.bottom
                - 1
                - (min(max(value, low), high) - low) / (high - low) * (plot.height - 1)
            )

        # a gap where the number was not finite, and a mark that says what it was
        piece: list[tuple[float, float]] = []
        for step, value in points:
            if math.isfinite(value):
                piece.append((x_of(step), y_of(value)))
                continue
            self._line(canvas, piece)
            piece = []
            mark = NAN_COLOR if math.isnan(value) else POSINF_COLOR if value > 0 else NEGINF_COLOR
            place = round(x_of(step))
            canvas.fill(place - 1, plot.top, place + 1, plot.bottom, mark)
        self._line(canvas, piece)
        if math.isfinite(self._latest[1]):
            x, y = x_of(self._latest[0]), y_of(self._latest[1])
            canvas.dots(
                np.array([x]), np.array([y]), max(3.0, at.small * 0.35),
                np.array([colors.ink], np.uint8),
            )  # fmt: skip

    def _line(self, canvas: Canvas, piece: list[tuple[float, float]]) -> None:
        color = self._style.colors.accent
        width = max(1.5, self._at.small * 0.16)
        canvas.curve([x for x, _ in piece], [y for _, y in piece], width, color)
