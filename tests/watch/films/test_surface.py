"""Surfaces: points in front hide those behind, and every color is where its height is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tensortap.rooms.figures.colors import (
    NAN_COLOR,
    NEGINF_COLOR,
    POSINF_COLOR,
    color_table,
    pixel_table,
)
from tensortap.rooms.watch.films.picture import ColorScale
from tensortap.rooms.watch.films.style import Box, Style
from tensortap.rooms.watch.films.surface import _LIGHTS, SurfaceView, drawn_over, lit_colors
from tests.watch.films.filming import draw, near

WALLS = (1, 2, 3), (4, 5, 6)


def scale():
    made = ColorScale(Style(range=(0, 1), colormap="grey"))
    made.update(None)
    return made


def seen(heights, room=(300, 240)):
    """Return which point of the grid, wall (-2, -1) or nothing (-3) each half pixel shows."""
    view = SurfaceView(*heights.shape, Box(0, 0, *room))
    rows, columns = view._grid
    numbers = np.arange(rows * columns, dtype=np.uint32)
    view._heights = lambda *_: (
        heights,
        np.concatenate([numbers, [2**32 - 2, 2**32 - 1, 2**32 - 3]]),
    )
    drawn = view.draw(heights, scale(), True, np.zeros(1, np.uint32))
    return view, drawn.astype(np.int64).astype(np.int32)


def marched(view, heights):
    """Compute the same by tracing rays: the first sample from the front that reaches a pixel."""
    _rows, columns = heights.shape
    depth = view._reach.shape[0]
    ground, reach = np.full(view._reach.shape, np.nan), np.full(view._reach.shape, -1.0)
    ground.reshape(-1)[view._at] = view._ground
    for k, at in enumerate(view._at):
        i, j = divmod(view._place[k], columns)
        right, down = float(view._right[k]), float(view._down[k])
        z = heights[i : i + 2, j : j + 2].astype(float)
        upper, lower = z[:, 0] + (z[:, 1] - z[:, 0]) * right
        z = upper + (lower - upper) * down
        reach.reshape(-1)[at] = z * view._rise + ground.reshape(-1)[at]
    top = view.area.height * 2
    found = np.full((top, view.area.width), -3)
    for x, y in itertools.product(range(view.area.width), range(top)):
        if y < view._front[x]:
            continue
        for v in range(depth):
            if reach[v, x] >= y + 1:
                code = view._seen[v, x]
                found[y, x] = code if code < heights.size else code - heights.size - 2
                break
    return found[::-1]


def test_every_pixel_agrees_with_ray_tracing():
    rng = np.random.default_rng(1)
    rough = rng.random((96, 96)).astype(np.float32)
    heights = (rough + np.roll(rough, 1, 0) + np.roll(rough, 1, 1)) / 3
    view, drawn = seen(heights, (90, 70))
    expected = marched(view, heights)
    agree = drawn == expected
    assert agree.mean() > 0.995  # float32 against float64, at the edges of pixels
    assert {-3, -2, -1} < set(np.unique(drawn))


def test_averages_half_pixels():
    under = np.array([[0xFF000000]], np.uint32)
    drawn = np.array([[0], [0xFF204060]], np.uint32)
    assert drawn_over(under, drawn).tolist() == [[0xFF102030]]
    assert drawn_over(under, np.zeros((2, 1), np.uint32)).tolist() == under.tolist()


def test_shows_nan_and_inf():
    x = np.random.default_rng(0).random((256, 256)).astype(np.float32) * 0.3
    x[0, 0] = 1.0
    assert not near(draw(x, mode="surface")[60:430], NAN_COLOR, 30).any()
    x[200, 100], x[100, 60], x[40, 200] = np.nan, np.inf, -np.inf
    frame = draw(x, mode="surface")[60:430]
    for color in (NAN_COLOR, POSINF_COLOR, NEGINF_COLOR):
        assert near(frame, color, 30).sum() > 10


def test_light_does_not_change_nan():
    lit = lit_colors(pixel_table(color_table("grey")), WALLS)
    strange = lit[253 * _LIGHTS : 254 * _LIGHTS].view(np.uint8).reshape(-1, 4)
    assert (strange[:, :3] == NAN_COLOR).all()


@pytest.mark.parametrize("shape", [(2, 2), (2, 300), (300, 2), (5, 7), (96, 257), (1000, 3)])
def test_draws_every_shape(shape):
    x = np.random.default_rng(0).standard_normal(shape)
    frame = draw(x, mode="surface", size=(320, 240), colormap="ember")
    assert len(np.unique(frame[60:200, 40:240].reshape(-1, 3), axis=0)) > 60


def test_noise_keeps_its_colors():
    """A matrix of weights has steep slopes: light must not make it black and white."""
    x = np.random.default_rng(0).standard_normal((256, 256))
    frame = draw(x, mode="surface", colormap=["#ff0000", "#ff0000"], range=(-4, 4))
    red = frame[100:400, 40:480].astype(float)
    lit = red[(red[..., 0] > 60) & (red[..., 1] < 10)][:, 0]
    assert len(lit) > 20_000
    assert np.percentile(lit, 5) > 110
    assert lit.std() > 10  # it is still a surface
