"""Heatmaps of characters for a terminal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.rooms.figures.reals import matrix_at
from tensortap.rooms.figures.terminal import heatmap


def lines(array, at=None, **options) -> list[str]:
    return heatmap(array, at, **options).plain.split("\n")


def test_shades_rise_from_smallest_to_largest():
    *rows, caption = lines(np.arange(6.0).reshape(1, 6), width=6, colored=False)
    assert rows == [" ·░▒▓█"]
    assert caption == "0 to 5"


@pytest.mark.parametrize("colored", [True, False])
def test_shows_one_nan_among_four_million(colored):
    array = np.zeros((2048, 2048), np.float32)
    array[::2] = 1
    array[700, 1500] = np.nan
    array[100, 100] = -np.inf
    *rows, caption = lines(array, width=60, height=20, colored=colored)
    assert len(rows) == 20
    assert {len(row) for row in rows} == {60}
    assert sum(row.count("!") for row in rows) == 1
    assert sum(row.count("^") for row in rows) == 1
    assert rows[int(700 / 2048 * 20)][int(1500 / 2048 * 60)] == "!"
    assert "each cell shows the extreme of" in caption


def test_centers_the_colors_at_zero_for_both_signs():
    picture = heatmap(np.array([[-1.0, 0.0, 4.0]]), width=3, height=1)
    assert picture.plain.endswith("-4 to 4")
    upper = [str(span.style).split()[0] for span in picture.spans[:3]]
    assert len(set(upper)) == 3


def test_draws_the_slice_at_an_index():
    array = np.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    assert (matrix_at(array)[0] == array[0, 0]).all()
    assert (matrix_at(array, (1, -1))[0] == array[1, 2]).all()
    assert lines(array, (1, 2))[-1].startswith("[1, 2, :, :]  100 to 119")
    with pytest.raises(ValueError, match=r"index must have 2 numbers .* \[2, 3, 4, 5\].* got 1"):
        matrix_at(array, (1,))
    with pytest.raises(ValueError, match=r"no \[1, 3\] in a tensor of shape"):
        matrix_at(array, (1, 3))


@pytest.mark.parametrize(
    "array",
    [np.zeros(()), np.zeros((0, 3)), np.array(["a", "b"]), np.full((2, 2), np.nan)],
    ids=["a number", "empty", "text", "nothing finite"],
)
def test_draws_nothing_without_finite_numbers(array):
    assert heatmap(array) is None


@given(
    st.lists(st.floats(width=64), min_size=2, max_size=30).map(np.array),
    st.integers(1, 12),
    st.booleans(),
)
def test_draws_any_numbers(array, width, colored):
    picture = heatmap(array, width=width, height=3, colored=colored)
    if picture is None:
        assert not np.isfinite(array).any()
    else:
        rows = picture.plain.split("\n")[:-1]
        assert all(len(row) <= width for row in rows)
        marked = any("!" in row for row in rows)
        assert marked == bool(np.isnan(array).any())
