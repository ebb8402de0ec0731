"""From values to colors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.films.scales import RangeFollower
from tensortap.films.style import Style
from tensortap.record import Summary
from tensortap.viz.colors import (
    DIVERGING,
    NAN,
    NEGINF,
    POSINF,
    SEQUENTIAL,
    STEPS,
    color_table,
    pixel_table,
)
from tensortap.viz.reals import Range, shares_of


class ColorScale:
    """The range and the colors of a film, frame by frame.

    Once both signs have occurred, the range is symmetric and the map diverging, unless the style
    says otherwise.
    """

    def __init__(self, style: Style) -> None:
        self._style = style
        self._follower = RangeFollower(style.range)
        self._decides = style.symmetric is None and isinstance(style.range, str)
        self.symmetric = bool(style.symmetric)
        if style.symmetric is None and not isinstance(style.range, str):
            self.symmetric = style.range[0] == -style.range[1]
        self.limits: Range = (0.0, 1.0)
        self._choose_colors()

    def _choose_colors(self) -> None:
        chosen = self._style.colormap
        if isinstance(chosen, str) and chosen == "auto":
            chosen = DIVERGING if self.symmetric else SEQUENTIAL
        self.table = color_table(chosen)
        self.pixels = pixel_table(self.table)

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
        """Return the middle of the range: shrinking keeps values that are far from it."""
        low, high = self.limits
        return low / 2 + high / 2


def color_indices(values: NDArray[Any], limits: Range, finite: bool) -> NDArray[np.uint8]:
    """Return the index of each value's color; `finite` promises that all values are.

    >>> x = np.array([0.0, 1.0, 5.0, np.nan, np.inf, -np.inf])
    >>> color_indices(x, (0.0, 1.0), False).tolist()
    [0, 252, 252, 253, 254, 255]
    """
    with np.errstate(all="ignore"):
        share = shares_of(values, limits)
        share *= STEPS - 1
        share += 0.5
        if not finite:
            share[np.isnan(values)] = NAN + 0.5
            share[values == np.inf] = POSINF + 0.5
            share[values == -np.inf] = NEGINF + 0.5
        return share.astype(np.uint8)
