"""The rows of a tensor as points: on two fixed axes (PCA), or by similarity (t-SNE).

The axes are those of the first frame, and t-SNE starts from the points of the last frame, so that
points move instead of jumping. Of many rows a fixed sample is drawn, as the heading tells.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.errors import MissingExtra
from tensortap.rooms.figures.reals import reals
from tensortap.rooms.films.canvas import Canvas, draw_plot_axes
from tensortap.rooms.films.pictures import FrameContent, Picture
from tensortap.rooms.films.style import (
    SEED,
    SEQUENTIAL,
    STEPS,
    FrameLayout,
    RangeFollower,
    Style,
    as_shares,
    color_table,
    ticks,
)

_MAX_ROWS = {"pca": 4000, "tsne": 600}


def point_shape(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the number of points and of features; None for a shape that has no points.

    A point lies along the last axis; in a tensor of four axes or more (filters, images) the first
    axis counts the points.

    >>> point_shape((8, 128, 64)), point_shape((16, 3, 5, 5)), point_shape((5,))
    ((1024, 64), (16, 75), None)
    """
    if len(shape) < 2 or not math.prod(shape):
        return None
    points = shape[0] if len(shape) >= 4 else math.prod(shape[:-1])
    features = math.prod(shape) // points
    return (points, features) if points >= 3 and features >= 2 else None


class ProjectionPicture(Picture):
    """Points on a plane, colored by the position of their rows."""

    def __init__(self, style: Style, layout: FrameLayout) -> None:
        super().__init__(style, layout)
        # PCA: how many features there are, their mean and the axes
        self._axes: tuple[int, NDArray[Any], NDArray[Any]] | None = None
        self._last: tuple[tuple[int, int], NDArray[Any]] | None = None  # shape and points of t-SNE
        self._followers = RangeFollower("follow"), RangeFollower("follow")
        # without the end that is too close to the background
        shown = [round(0.12 * STEPS + 0.88 * i) for i in range(STEPS)]
        self._table = color_table(SEQUENTIAL)[shown]

    def draw(self, canvas: Canvas, content: FrameContent) -> None:
        """Draw the rows as points, the first row in the darkest color."""
        shape = point_shape(content.inner)
        assert shape is not None
        count, features = shape
        rng = np.random.default_rng(SEED)
        rows = _sample(rng, count, _MAX_ROWS[self._style.mode])
        columns = _sample(rng, features, 4096)
        data = reals(content.reshaped(shape)[rows][:, columns]).astype(np.float64)
        finite = np.asarray(np.isfinite(data).all(axis=1))
        shown = int(finite.sum())
        notes = [
            f"{len(rows):,} of {count:,} rows" if len(rows) < count else "",
            f"{len(columns):,} of {features:,} features" if len(columns) < features else "",
            f"{len(rows) - shown:,} rows not finite" if shown < len(rows) else "",
        ]
        self.note = " · ".join(filter(None, notes))
        self.points = np.full((len(rows), 2), np.nan)
        if shown >= 3:
            self.points[finite] = self._project(data, finite, shape)
            colors = self._table[np.rint(rows / max(1, count - 1) * (STEPS - 1)).astype(int)]
            self._draw_points(canvas, self.points[finite], colors[finite])

    def _project(
        self, data: NDArray[Any], finite: NDArray[np.bool_], shape: tuple[int, int]
    ) -> NDArray[Any]:
        used = data[finite]
        scale = float(np.abs(used).max()) or 1.0
        used = used / scale  # squares stay within float64
        if self._style.mode == "tsne":
            return self._by_similarity(used, finite, shape)
        if self._axes is None or self._axes[0] != shape[1]:
            mean = used.mean(axis=0)
            self._axes = shape[1], mean * scale, main_axes(used - mean)
            self._followers = RangeFollower("follow"), RangeFollower("follow")
        _, mean, axes = self._axes
        projected: NDArray[Any] = (used * scale - mean) @ axes
        return projected

    def _by_similarity(
        self, data: NDArray[Any], finite: NDArray[np.bool_], shape: tuple[int, int]
    ) -> NDArray[Any]:
        """Return t-SNE of the finite rows, from the points of the last frame if it was alike."""
        if not np.ptp(data, axis=0).any():  # all rows are equal
            return np.zeros((len(data), 2))
        if self._last is not None and self._last[0] == shape:
            points = _tsne(data, self._last[1][finite], again=True)
        else:
            centered = data - data.mean(axis=0)
            start = centered @ main_axes(centered)
            points = _tsne(data, start / (start[:, 0].std() or 1.0) * 1e-4, again=False)
        kept = np.zeros((len(finite), 2))
        kept[finite] = points
        self._last = shape, kept
        return points

    def _draw_points(self, canvas: Canvas, points: NDArray[Any], colors: NDArray[np.uint8]) -> None:
        layout = self._layout
        plot = layout.plot_box(layout.room.right - layout.margin // 2)
        limits = []
        for follower, along in zip(self._followers, points.T, strict=True):
            low, high = follower.next(float(along.min()), float(along.max()))
            pad = (high - low) * 0.06
            limits.append((low - pad, high + pad))
        across, up = (
            as_shares(each, ticks(*each, most))
            for each, most in zip(limits, layout.most_ticks(plot), strict=True)
        )
        draw_plot_axes(canvas, layout, plot, across=across, up=up)
        low, high = np.array(limits).T
        shares = (points - low) / (high - low)
        xs = plot.left + shares[:, 0] * (plot.width - 1)
        ys = plot.bottom - 1 - shares[:, 1] * (plot.height - 1)
        radius = max(1.5, min(5.0, 60 / math.sqrt(len(points)))) * max(1.0, layout.small / 12)
        canvas.dots(xs, ys, round(radius, 1), colors)


def _sample(rng: np.random.Generator, count: int, most: int) -> NDArray[np.int64]:
    """Return all indices, or a sorted sample of them."""
    return np.arange(count) if count <= most else np.sort(rng.choice(count, most, replace=False))


def main_axes(centered: NDArray[Any]) -> NDArray[Any]:
    """Return the two main axes of centered data, by power iterations.

    The largest part of each axis is positive, whatever the solver returned.
    """
    features = centered.shape[1]
    basis = np.random.default_rng(SEED).standard_normal((features, min(8, features)))
    for _ in range(10):
        basis = np.linalg.qr(centered.T @ (centered @ basis))[0]
    _, _, vectors = np.linalg.svd(centered @ basis, full_matrices=False)
    axes = basis @ vectors[:2].T
    largest = axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])]
    signed: NDArray[Any] = axes * np.where(largest < 0, -1.0, 1.0)
    return signed


def _tsne(data: NDArray[Any], start: NDArray[Any], *, again: bool) -> NDArray[Any]:
    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise MissingExtra.of("mode='tsne' needs scikit-learn", "tsne") from None
    rounds = "max_iter" if hasattr(TSNE(), "max_iter") else "n_iter"  # scikit-learn 1.4
    solver = TSNE(
        init=start.astype(np.float32),
        perplexity=min(30.0, max(2.0, (len(data) - 1) / 3)),
        early_exaggeration=1.0 if again else 12.0,  # no new explosion of known points
        learning_rate="auto",
        random_state=SEED,
        **{rounds: 250 if again else 500},
    )
    # one thread: the processors belong to training, and waiting threads are slow
    with threadpool_limits(1):
        return np.asarray(solver.fit_transform(data), np.float64)
