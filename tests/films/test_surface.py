"""Surfaces: points in front hide those behind, and every color is where its height is."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.rooms.films import pictures
from tensortap.rooms.films.style import NAN_COLOR, NEGINF_COLOR, POSINF_COLOR, STEPS, Box
from tensortap.rooms.films.surface import _POINTS, SurfaceView
from tests.films.filming import draw, near

SIDE = _POINTS


def test_every_pixel_agrees_with_ray_tracing():
    rough = np.random.default_rng(1).random((SIDE, SIDE)).astype(np.float32)
    view = SurfaceView(Box(0, 0, 90, 70))
    numbers = np.arange(1, SIDE**2 + 1, dtype=np.uint32).reshape(SIDE, SIDE)
    drawn = view.draw(rough, numbers, (0, 0, 0))[::-1].astype(np.int64)
    wall = 0xFF000000
    expected = np.zeros_like(drawn)
    rise = view.on_screen(0, 0, 0)[1] - view.on_screen(0, 0, 1)[1]
    codes = view._codes.reshape(-1, view.area.width)
    for y, x in np.ndindex(drawn.shape):
        if y >= view._front[x]:
            # the first sample from the front that reaches the pixel
            reach = rough.reshape(-1)[view._point[:, x]] * rise + view._ground[:, x]
            hits = np.flatnonzero(reach >= y + 1)
            code = codes[hits[0], x] if len(hits) else SIDE**2 + 1
            expected[y, x] = code + 1 if code < SIDE**2 else wall * (code == SIDE**2)
    assert (drawn == expected).mean() > 0.995  # float32 against float64, at the edges of pixels
    assert {0, wall} < set(np.unique(drawn))


def test_shows_nan_and_inf():
    x = np.random.default_rng(0).random((256, 256)).astype(np.float32) * 0.3
    x[0, 0] = 1.0
    assert not near(draw(x, mode="surface")[60:430], NAN_COLOR, 30).any()
    x[200, 100], x[100, 60], x[40, 200] = np.nan, np.inf, -np.inf
    frame = draw(x, mode="surface")[60:430]
    for color in (NAN_COLOR, POSINF_COLOR, NEGINF_COLOR):
        assert near(frame, color, 0).sum() > 10  # light does not change it


@pytest.mark.parametrize("shape", [(2, 2), (2, 300), (96, 257), (1000, 3)])
def test_draws_every_shape(shape):
    x = np.random.default_rng(0).standard_normal(shape)
    frame = draw(x, mode="surface", size=(320, 240))
    assert len(np.unique(frame[60:200, 40:240].reshape(-1, 3), axis=0)) > 60


def test_noise_keeps_its_colors(monkeypatch):
    """A matrix of weights has steep slopes: light must not make it black and white."""
    x = np.random.default_rng(0).standard_normal((256, 256))
    red_only = np.tile(np.uint8([255, 0, 0]), (STEPS, 1))
    monkeypatch.setattr(pictures, "color_table", lambda _: red_only)
    frame = draw(x, mode="surface", range=(-4, 4))
    red = frame[100:400, 40:480].astype(float)
    lit = red[(red[..., 0] > 60) & (red[..., 1] < 10)][:, 0]
    assert len(lit) > 20_000
    assert np.percentile(lit, 5) > 110
    assert lit.std() > 10  # it is still a surface
