"""The content of a frame, and the base class of all pictures."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Record, Summary, TensorData
from tensortap.rooms.figures.colors import (
    DIVERGING,
    NAN,
    NEGINF,
    POSINF,
    SEQUENTIAL,
    STEPS,
    color_table,
    pixel_table,
)
from tensortap.rooms.figures.reals import Range, shares_of
from tensortap.rooms.watch.films.canvas import Canvas
from tensortap.rooms.watch.films.style import FrameLayout, RangeFollower, Style
from tensortap.runs.reader import value_of
from tensortap.stats import summarize_array
from tensortap.stats.conversion import is_number
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
        shape = self.shape
        while shape and shape[0] == 1:
            shape = shape[1:]
        return shape

    @property
    def is_finite(self) -> bool:
        """True if all values are known to be finite."""
        return self.summary is not None and self.summary.finite == self.summary.count

    def reshaped(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the tensor in another shape."""
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
        """The middle of the range: shrinking keeps values that are far from it."""
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
