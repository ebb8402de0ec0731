"""Points that move instead of jumping."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.films.frames import Painter
from tensortap.films.projections import _axes_exact, _axes_low_rank, point_shape
from tensortap.films.style import Style
from tests.films.filming import record


def clouds(shift=0.0, rows=60, features=12):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((rows, features)) * np.linspace(3, 0.1, features)
    x[: rows // 2] += 8 + shift
    return x


def points(mode, *tensors, seed=0):
    painter = Painter(Style(mode=mode, size=(320, 240), seed=seed))
    found = []
    for step, x in enumerate(tensors):
        painter.draw(record(x, step=step))
        found.append(painter._pictures[mode]._points.copy())
    picture = painter._pictures[mode]
    return found, " · ".join(filter(None, (picture.note, picture.aside)))


@pytest.mark.parametrize(("mode", "exact"), [("pca", 1e-6), ("pca_lowrank", 0.01)])
def test_the_first_axes_are_kept(mode, exact):
    from sklearn.decomposition import PCA

    first, second = clouds(), clouds(shift=1.0)
    (a, b), note = points(mode, first, second)
    expected = PCA(2).fit(first)
    for found, x in ((a, first), (b, second)):
        wanted = expected.transform(x)
        for axis in (0, 1):
            sign = np.sign(found[:, axis] @ wanted[:, axis])
            assert found[:, axis] * sign == pytest.approx(wanted[:, axis], abs=exact)
    assert note == "axes of step 0"


def test_the_axes_of_many_features_are_those_of_all():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 200)) * 0.1
    x += rng.standard_normal((300, 2)) * [5, 3] @ rng.standard_normal((2, 200))
    x -= x.mean(axis=0)
    exact, quick = _axes_exact(x, 0), _axes_low_rank(x, 0)
    assert np.abs((exact * quick).sum(axis=0)) == pytest.approx([1, 1], abs=1e-6)


def test_other_features_need_other_axes_and_that_is_said():
    found, note = points("pca", clouds(), clouds(features=7))
    assert np.isfinite(found[1]).all()
    assert note == "axes of step 1"


def test_large_tensors_are_sampled_always_alike_and_it_is_said():
    x = np.random.default_rng(0).standard_normal((9000, 5))
    (a, b), note = points("pca", x, x)
    assert a.shape == (4000, 2)
    assert (a == b).all()
    assert "4,000 of 9,000 rows" in note
    other, _ = points("pca", x, seed=1)
    assert not (other[0] == a).all()


def test_rows_that_are_not_finite_are_left_out_and_it_is_said():
    x = clouds()
    x[5, 3], x[7, 0] = np.nan, np.inf
    (found,), note = points("pca", x)
    assert np.isnan(found[[5, 7]]).all()
    assert np.isfinite(np.delete(found, [5, 7], 0)).all()
    assert "2 rows not finite" in note


def test_points_of_t_sne_move_and_do_not_jump():
    """Nearly the same tensor: a point ends far nearer to itself than to others."""
    first, second = clouds(), clouds() + 0.01 * np.random.default_rng(0).standard_normal((60, 12))
    (a, b), note = points("tsne", first, second)
    moved = np.linalg.norm(a - b, axis=1)
    assert np.median(moved) < 0.2 * np.ptp(a, axis=0).max()
    halves = np.linalg.norm(b[:30].mean(0) - b[30:].mean(0))
    assert halves > b[:30].std()  # both clouds are still apart
    assert note == "t-SNE"
    (again,), _ = points("tsne", first)
    assert (again == a).all()  # a fixed seed


def test_the_colours_of_the_points_are_those_of_their_rows():
    """The first row has the colour at the foot of the bar, the last that at its top."""
    painter = Painter(Style(mode="pca"))
    frame = painter.draw(record(clouds()))[..., :3]
    picture = painter._pictures["pca"]
    bar = frame[80:420, 570:580].reshape(-1, 3)
    for color in picture._colors[[0, 30, -1]]:
        assert (np.abs(bar.astype(int) - color).max(axis=-1) < 8).any()
    assert frame[410, 575].tolist() == pytest.approx(picture._colors[0].tolist(), abs=12)
    assert frame[85, 575].tolist() == pytest.approx(picture._colors[-1].tolist(), abs=12)


def test_what_is_a_point():
    assert point_shape((10, 20)) == (10, 20)
    assert point_shape((4, 10, 20)) == (40, 20)
    assert point_shape((8, 3, 5, 5)) == (8, 75)
    assert point_shape((2, 20)) is None  # two points span no plane
    assert point_shape((20, 1)) is None
    assert point_shape((0, 4)) is None


def test_huge_numbers_are_projected_too():
    (found,), _ = points("pca", clouds() * 1e300)
    assert np.isfinite(found).all()
