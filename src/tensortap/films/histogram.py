"""How the values of a tensor are spread, counted exactly; the first frame stays as a faint line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tensortap.films.canvas import Canvas
from tensortap.films.legend import plot_axes, shares
from tensortap.films.look import Look
from tensortap.films.scales import Follower, Range, ticks
from tensortap.films.shades import shares_of
from tensortap.films.style import Box, Measures, Style
from tensortap.record import Summary
from tensortap.text.tensors import number
from tensortap.viz.reals import reals

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CHUNK = 1 << 20
_LINE = 1.6  # times the highest bar that the line of the first frame may reach


def counts_of(array: NDArray[Any], limits: Range, bins: int) -> NDArray[np.int64]:
    """How many finite values lie in each of `bins` equal parts of a range; all that lie in it.

    >>> import numpy as np
    >>> counts_of(np.array([0.0, 0.1, 0.9, 1.0, np.nan, 7.0]), (0.0, 1.0), 2).tolist()
    [2, 2]
    """
    import numpy as np

    low, high = limits
    found = np.zeros(bins, np.int64)
    flat = array.reshape(-1)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, _CHUNK):
            values = reals(flat[start : start + _CHUNK])
            values = values[(values >= low) & (values <= high)]
            where = (shares_of(values, limits) * bins).astype(np.int64)
            found += np.bincount(np.minimum(where, bins - 1), minlength=bins)
    return found


class HistogramPicture:
    """Bars of counts; of statistics without values, the exponents that were counted."""

    def __init__(self, style: Style, at: Measures) -> None:
        self._style, self._at = style, at
        self._across, self._up = Follower(style.range), Follower("follow")
        self._limits: Range = (0.0, 1.0)
        self._first: tuple[Range, NDArray[Any], int] | None = None
        self._bins_seen: tuple[int, int] | None = None
        self.note = self.aside = ""

    def see(self, look: Look) -> object:
        """What the still part of the frame depends on."""
        only_stats = look.array is None
        self.note = "counts of exponents" if only_stats else ""
        self.aside = "" if self._first is None else f"line: step {self._first[2]:,}"
        summary = look.summary
        if only_stats or summary is None:
            return only_stats
        self._limits = self._across.next(summary.min, summary.max)
        return only_stats

    def still(self, canvas: Canvas, box: Box, look: Look) -> None:
        """Nothing: both axes move."""

    def draw(self, canvas: Canvas, box: Box, look: Look) -> None:
        """The bars of this frame."""
        at = self._at
        beside, below = (round(at.small * 3.4), at.small + 9) if at.header else (0, 0)
        plot = Box(box.left + beside, box.top, box.right - at.margin // 2, box.bottom - below)
        if look.array is not None:
            bins = self._bins(look, plot)
            counts = counts_of(look.array, self._limits, bins)
            self._bars(canvas, plot, counts, shares(self._limits, self._ticks(plot)), look.step)
        elif look.summary is not None:
            self._bars(canvas, plot, *self._exponents(look.summary), look.step)

    def _exponents(self, summary: Summary) -> tuple[NDArray[Any], list[tuple[float, str]]]:
        """The counts of all exponents that have occurred so far, so that the axis stays."""
        import numpy as np

        first, last = summary.first_bin, summary.first_bin + max(1, len(summary.bins))
        if self._bins_seen is not None:
            first, last = min(first, self._bins_seen[0]), max(last, self._bins_seen[1])
        self._bins_seen = first, last
        self._limits = float(first), float(last)
        counts = np.zeros(last - first, np.int64)
        counts[summary.first_bin - first :][: len(summary.bins)] = summary.bins
        step = max(1, math.ceil(len(counts) / 10))
        labels = [
            ((i + 0.5) / len(counts), f"2^{first + i}")
            for i in range(len(counts))
            if (first + i) % step == 0
        ]
        return counts, labels

    def _ticks(self, plot: Box) -> list[tuple[float, str]]:
        return ticks(*self._limits, max(2, plot.width // max(40, self._at.small * 6)))

    def _bins(self, look: Look, plot: Box) -> int:
        """As fine as the values are many, in bars of whole pixels."""
        assert look.array is not None
        low, high = self._limits
        wanted = 8 + 8 * math.log2(look.array.size + 1)
        if look.array.dtype.kind in "biu" and high - low < wanted:
            # a bar an integer: others would show a comb that is not there
            self._limits = (math.floor(low) - 0.5, math.ceil(high) + 0.5)
            return round(self._limits[1] - self._limits[0])
        return max(4, min(int(wanted), plot.width // 3, 120))

    def _bars(
        self,
        canvas: Canvas,
        plot: Box,
        counts: NDArray[Any],
        across: list[tuple[float, str]],
        step: int,
    ) -> None:
        import numpy as np

        style, at = self._style, self._at
        colors = style.colors
        line = self._line(counts, step)
        highest = float(counts.max(initial=0))
        if line is not None:  # which is not cut off, unless it makes all else low
            highest = max(highest, min(float(line.max(initial=0)), highest * _LINE))
        top = self._up.next(0.0, max(1.0, highest * 1.06))[1]
        found = [
            (v, number(v)) for v, _ in ticks(0.0, top, max(2, plot.height // (at.small * 4 + 12)))
        ]
        up = shares((0.0, top), [(v, words) for v, words in found if v == int(v)])
        plot_axes(canvas, style, at, plot, across=across, up=up)
        edges = np.rint(np.linspace(plot.left, plot.right, len(counts) + 1)).astype(int)
        heights = np.rint(counts / top * (plot.height - 1)).astype(int)
        heights[counts > 0] = np.maximum(heights[counts > 0], 1)  # what is there is seen
        gap = 1 if plot.width / len(counts) >= 4 else 0
        for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True):
            if height:
                canvas.fill(
                    int(left), plot.bottom - int(height), max(int(right) - gap, int(left) + 1),
                    plot.bottom, colors.accent,
                )  # fmt: skip
        if line is not None:
            self._outline(canvas, plot, line / top * (plot.height - 1))

    def _line(self, counts: NDArray[Any], step: int) -> NDArray[Any] | None:
        """How it was spread at first: as many as it would be in bins of now."""
        total = max(1, int(counts.sum()))
        each = (self._limits[1] - self._limits[0]) / len(counts)
        if self._first is None:
            if counts.any():
                self._first = self._limits, counts / (total * each), step
            return None
        found: NDArray[Any] = self._first[1] * each * total
        return found

    def _outline(self, canvas: Canvas, plot: Box, heights: NDArray[Any]) -> None:
        """The line, in steps; what is higher than the plot leaves it open."""
        import numpy as np

        assert self._first is not None
        low, high = self._first[0]
        start, end = self._limits
        edges = np.linspace(low, high, len(heights) + 1)
        xs = plot.left + (edges - start) / (end - start) * plot.width
        if not np.isfinite(xs).all():
            return
        across = np.rint(xs.clip(plot.left, plot.right)).astype(int).tolist()
        ys = plot.bottom - heights.clip(0, plot.height + 1) - 1
        down = np.rint(ys).astype(int).tolist()
        ink = self._style.colors.dim
        before = plot.bottom - 1
        for left, right, y in zip(across[:-1], across[1:], down, strict=True):
            if left < right:
                upper, lower = max(min(before, y), plot.top), max(before, y)
                canvas.fill(left, upper, left + 1, lower + 1, ink)
                if y >= plot.top:
                    canvas.fill(left, y, right, y + 1, ink)
                before = y
