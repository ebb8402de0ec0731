"""The rows of a tensor as points: on two axes that are kept (PCA), or by likeness (t-SNE).

The axes are those of the film's first frame, and t-SNE begins where the last frame ended, so that
points move instead of jumping. Of many rows a fixed choice is drawn, and the legend says so.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

from tensortap.errors import MissingExtra
from tensortap.films.canvas import Canvas
from tensortap.films.legend import bar_width, beside_bar, color_bar, plot_axes, shares
from tensortap.films.look import Look
from tensortap.films.scales import Follower, ticks, whole_ticks
from tensortap.films.style import Box, Measures, Style
from tensortap.viz.colors import SEQUENTIAL, STEPS, color_table, packed
from tensortap.viz.reals import reals

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_ROWS = {"pca": 4000, "pca_lowrank": 4000, "tsne": 600}
_MOST_FEATURES = 4096
_EXACT_FEATURES = 512  # of more, the exact axes would take seconds
_RANK = 8


def point_shape(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """How many points of how many numbers; None of what has no two axes.

    The last axis holds a point; of four axes or more (filters, pictures) the first one counts
    the points.

    >>> point_shape((8, 128, 64)), point_shape((16, 3, 5, 5)), point_shape((5,))
    ((1024, 64), (16, 75), None)
    """
    if len(shape) < 2 or not math.prod(shape):
        return None
    points = shape[0] if len(shape) >= 4 else math.prod(shape[:-1])
    features = math.prod(shape) // points
    return (points, features) if points >= 3 and features >= 2 else None


class ProjectionPicture:
    """Points on a plane, each in the colour of its place among the rows."""

    def __init__(self, style: Style, at: Measures, mode: str) -> None:
        self._style, self._at, self._mode = style, at, mode
        self._across, self._up = Follower("follow"), Follower("follow")
        self._axes: tuple[tuple[int, int], NDArray[Any], NDArray[Any], str] | None = None
        self._last: tuple[tuple[int, int], NDArray[Any]] | None = None
        table = color_table(style.colormap if style.colormap != "auto" else SEQUENTIAL)
        # without the end that could not be told from the ground
        first = 0.12 if style.theme == "dark" else 0.0
        self._table = table[[round(first * STEPS + 0.88 * i) for i in range(STEPS)]]
        self._points: NDArray[Any] | None = None
        self._colors: NDArray[Any] | None = None
        self.note = self.aside = ""

    def see(self, look: Look) -> object:
        """Find the points: what is said about them is part of the heading."""
        import numpy as np

        shape = point_shape(look.inner)
        assert shape is not None
        assert look.array is not None
        count, features = shape
        rng = np.random.default_rng(self._style.seed)
        rows = _choice(rng, count, _MOST_ROWS[self._mode])
        columns = _choice(rng, features, _MOST_FEATURES)
        data = reals(look.array.reshape(shape)[rows][:, columns]).astype(np.float64)
        with np.errstate(all="ignore"):
            whole: NDArray[Any] = np.asarray(np.isfinite(data).all(axis=1))
            scale = np.abs(data[whole]).max(initial=0.0)
            data = data / (scale or 1.0)  # squares stay within float64
        words: list[str] = []
        asides: list[str] = []
        if len(rows) < count:
            words.append(f"{len(rows):,} of {count:,} rows")
        if len(columns) < features:
            words.append(f"{len(columns):,} of {features:,} numbers of each")
        if not whole.all():
            strange = int((~whole).sum())
            asides.append(f"{strange:,} {'row' if strange == 1 else 'rows'} not finite")
        self._points = np.full((len(rows), 2), np.nan)
        if whole.sum() >= 3:
            self._points[whole], said = self._project(data, whole, shape, scale or 1.0, look)
            asides.append(said)
        self.aside = " · ".join(asides)
        self._colors = self._table[np.rint(rows / max(1, count - 1) * (STEPS - 1)).astype(int)]
        self.note = " · ".join(words)
        return None

    def _project(
        self, data: NDArray[Any], whole: NDArray[Any], shape: tuple[int, int], scale: float,
        look: Look,
    ) -> tuple[NDArray[Any], str]:  # fmt: skip
        if self._mode == "tsne":
            return self._likeness(data, whole, shape), "t-SNE"
        used = data[whole]
        if self._axes is None or self._axes[0][1] != shape[1]:
            middle = used.mean(axis=0)
            low_rank = self._mode == "pca_lowrank" or used.shape[1] > _EXACT_FEATURES
            axes = _axes_low_rank if low_rank else _axes_exact
            found = axes(used - middle, self._style.seed)
            self._axes = shape, middle * scale, found, f"axes of step {look.step:,}"
            self._across, self._up = Follower("follow"), Follower("follow")
        _, middle, basis, said = self._axes
        return (used * scale - middle) @ basis, said

    def _likeness(
        self, data: NDArray[Any], whole: NDArray[Any], shape: tuple[int, int]
    ) -> NDArray[Any]:
        import numpy as np

        used = data[whole]
        if not np.ptp(used, axis=0).any():  # all alike: there is no likeness to speak of
            return np.zeros((len(used), 2))
        start: NDArray[Any]
        again = self._last is not None and self._last[0] == shape
        if again and self._last is not None:
            start = self._last[1][whole]
        else:
            start = (used - used.mean(axis=0)) @ _axes_low_rank(
                used - used.mean(axis=0), self._style.seed
            )
            start = start / (start[:, 0].std() or 1.0) * 1e-4
        points = _tsne(used, start, self._style.seed, again)
        kept = np.zeros((len(whole), 2))
        kept[whole] = points
        self._last = shape, kept
        return points

    def still(self, canvas: Canvas, box: Box, look: Look) -> None:
        """The colours of the rows; both axes move."""
        at, shape = self._at, point_shape(look.inner)
        assert shape is not None
        if not at.header:
            return
        down = round(at.small * 1.6)
        beside = Box(box.left, box.top + down, box.right, box.bottom - at.small - 9)
        bar = color_bar(canvas, at, beside, packed(self._table))
        middle = (bar.left + bar.right) / 2
        canvas.text(middle, box.top + down / 2, "row", at.small, self._style.colors.dim, "middle")
        last = max(1, shape[0] - 1)
        rows = whole_ticks(shape[0], max(2, bar.height // (at.small * 3)))
        said = [(float(row), _place_name(row)) for row in rows]
        beside_bar(canvas, self._style, at, bar, (0.0, float(last)), said)

    def draw(self, canvas: Canvas, box: Box, look: Look) -> None:
        """The points of this frame."""
        import numpy as np

        assert self._points is not None
        assert self._colors is not None
        at = self._at
        beside, below = (round(at.small * 3.4), at.small + 9) if at.header else (0, 0)
        right = box.right - bar_width(at)
        plot = Box(box.left + beside, box.top, right, box.bottom - below)
        shown = np.isfinite(self._points).all(axis=1)
        points = self._points[shown]
        ends = (points.min(axis=0), points.max(axis=0)) if len(points) else (np.zeros(2),) * 2
        limits = []
        for axis, follower in enumerate((self._across, self._up)):
            low, high = follower.next(float(ends[0][axis]), float(ends[1][axis]))
            pad = (high - low) * 0.06
            limits.append((low - pad, high + pad))
        most = (
            max(2, plot.width // max(50, at.small * 7)),
            max(2, plot.height // (at.small * 4 + 12)),
        )
        found = [shares(each, ticks(*each, n)) for each, n in zip(limits, most, strict=True)]
        plot_axes(canvas, self._style, at, plot, across=found[0], up=found[1])
        if not len(points):
            return
        place = [(points[:, axis] - low) / (high - low) for axis, (low, high) in enumerate(limits)]
        xs = plot.left + place[0] * (plot.width - 1)
        ys = plot.bottom - 1 - place[1] * (plot.height - 1)
        radius = max(1.5, min(5.0, 60 / math.sqrt(len(points)))) * max(1.0, at.small / 12)
        canvas.dots(xs, ys, round(radius, 1), self._colors[shown])


def _place_name(row: int) -> str:
    """A row in few letters.

    >>> _place_name(20_000), _place_name(250_000), _place_name(1_500_000)
    ('20000', '250k', '1.5M')
    """
    if row < 100_000:
        return str(row)
    return f"{row / 1e6:g}M" if row >= 10**6 else f"{row / 1e3:g}k"


def _choice(rng: np.random.Generator, count: int, most: int) -> NDArray[np.int64]:
    """All, or so many of them, the same ones for every frame."""
    import numpy as np

    if count <= most:
        return np.arange(count)
    return np.sort(rng.choice(count, most, replace=False))


def _axes_exact(centred: NDArray[Any], seed: int) -> NDArray[Any]:
    """The two directions along which points are spread most."""
    import numpy as np

    _, vectors = np.linalg.eigh(centred.T @ centred)
    return _signed(vectors[:, [-1, -2]])


def _axes_low_rank(centred: NDArray[Any], seed: int) -> NDArray[Any]:
    """The same from a random projection, refined by power iterations: for many features."""
    import numpy as np

    features = centred.shape[1]
    rng = np.random.default_rng(seed)
    basis = rng.standard_normal((features, min(_RANK, features)))
    for _ in range(4):
        basis = np.linalg.qr(centred.T @ (centred @ basis))[0]
    _, _, vectors = np.linalg.svd(centred @ basis, full_matrices=False)
    return _signed(basis @ vectors[:2].T)


def _signed(axes: NDArray[Any]) -> NDArray[Any]:
    """The largest part of each axis is positive, whatever the solver made of it."""
    import numpy as np

    largest = axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])]
    return axes * np.where(largest < 0, -1.0, 1.0)


def _tsne(data: NDArray[Any], start: NDArray[Any], seed: int, again: bool) -> NDArray[Any]:
    import numpy as np

    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise MissingExtra(
            "mode='tsne' needs scikit-learn: pip install 'tensortap[video]'"
        ) from None
    rounds = "max_iter" if "max_iter" in inspect.signature(TSNE).parameters else "n_iter"
    solver = TSNE(
        init=start.astype(np.float32),
        perplexity=min(30.0, max(2.0, (len(data) - 1) / 3)),
        # from where the points are, no new explosion is wanted
        early_exaggeration=1.0 if again else 12.0,
        learning_rate="auto",
        random_state=seed,
        **{rounds: 250 if again else 500},
    )
    # one thread: the processors belong to training, and threads that wait for them are slow
    with threadpool_limits(1):
        found: NDArray[Any] = np.asarray(solver.fit_transform(data), np.float64)
    return found
