"""Projections whose points move instead of jumping."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.rooms.films.frames import Painter
from tensortap.rooms.films.projections import point_shape
from tensortap.rooms.films.style import Style
from tests.films.filming import record


def clouds(shift=0.0, rows=60, features=12):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((rows, features)) * np.linspace(3, 0.1, features)
    x[: rows // 2] += 8 + shift
    return x


def points(mode, *tensors):
    painter = Painter(Style(mode=mode, size=(320, 240)))
    found = []
    for step, x in enumerate(tensors):
        painter.draw(record(x, step=step))
        found.append(painter._pictures[mode].points.copy())
    return found, painter._pictures[mode].note


def test_keeps_the_axes_of_the_first_frame():
    first, second = clouds(), clouds(shift=1.0)
    found, _ = points("pca", first, second)
    mean = first.mean(axis=0)
    axes = np.linalg.svd(first - mean)[2][:2].T
    for seen, x in zip(found, (first, second), strict=True):
        wanted = (x - mean) @ axes
        signs = np.sign((seen * wanted).sum(axis=0))
        assert seen * signs == pytest.approx(wanted, abs=1e-6)


def test_finds_new_axes_for_other_features():
    found, _ = points("pca", clouds(), clouds(features=7))
    assert np.isfinite(found[1]).all()


def test_samples_large_tensors_deterministically():
    x = np.random.default_rng(0).standard_normal((9000, 5))
    (a, b), note = points("pca", x, x)
    assert a.shape == (4000, 2)
    assert (a == b).all()
    assert "4,000 of 9,000 rows" in note


def test_notes_rows_that_are_not_finite():
    x = clouds()
    x[5, 3], x[7, 0] = np.nan, np.inf
    (found,), note = points("pca", x)
    assert np.isnan(found[[5, 7]]).all()
    assert np.isfinite(np.delete(found, [5, 7], 0)).all()
    assert "2 rows not finite" in note


@pytest.mark.slow
def test_tsne_points_do_not_jump():
    """For nearly the same tensor, a point ends much nearer to itself than to others."""
    first, second = clouds(), clouds() + 0.01 * np.random.default_rng(0).standard_normal((60, 12))
    (a, b), _ = points("tsne", first, second)
    moved = np.linalg.norm(a - b, axis=1)
    assert np.median(moved) < 0.2 * np.ptp(a, axis=0).max()
    halves = np.linalg.norm(b[:30].mean(0) - b[30:].mean(0))
    assert halves > b[:30].std()  # both clouds stay apart
    (again,), _ = points("tsne", first)
    assert (again == a).all()  # a fixed seed


def test_shapes_of_points():
    assert point_shape((2, 20)) is None  # two points span no plane
    assert point_shape((20, 1)) is None
    assert point_shape((0, 4)) is None


def test_projects_huge_numbers():
    (found,), _ = points("pca", clouds() * 1e300)
    assert np.isfinite(found).all()
