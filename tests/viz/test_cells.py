"""A tensor as a small heatmap in characters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.errors import TensortapError
from tensortap.viz.cells import heatmap, slice_of


def lines(array, at=None, **options) -> list[str]:
    return heatmap(array, at, **options).plain.split("\n")


def test_shades_go_from_the_smallest_to_the_largest():
    *rows, caption = lines(np.arange(6.0).reshape(1, 6), width=6, colored=False)
    assert rows == [" ·░▒▓█"]
    assert caption == "0 to 5"


def test_a_small_one_is_drawn_larger():
    *rows, _ = lines(np.eye(2), width=72, height=20, colored=False)
    assert len(rows) == 8
    assert rows[0] == "█" * 8 + " " * 8


@pytest.mark.parametrize("colored", [True, False])
def test_one_nan_in_four_million_is_seen(colored):
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
    assert "a cell is the farthest from the middle of" in caption


def test_the_middle_of_the_colours_is_zero_where_there_are_both_signs():
    picture = heatmap(np.array([[-1.0, 0.0, 4.0]]), width=3, height=1)
    assert picture.plain.endswith("-4 to 4")
    upper = [str(span.style).split()[0] for span in picture.spans[:3]]
    assert len(set(upper)) == 3


def test_slices():
    array = np.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    assert (slice_of(array).matrix == array[0, 0]).all()
    assert (slice_of(array, (1, -1)).matrix == array[1, 2]).all()
    assert lines(array, (1, 2))[-1].startswith("[1, 2, :, :]  100 to 119")
    assert slice_of(np.zeros(7)).matrix.shape == (1, 7)
    with pytest.raises(TensortapError, match=r"\[2, 3, 4, 5\] is shown at 2 indices, not at \[1\]"):
        slice_of(array, (1,))
    with pytest.raises(TensortapError, match=r"no \[1, 3\] in a tensor of shape"):
        slice_of(array, (1, 3))


@pytest.mark.parametrize(
    "array",
    [np.zeros(()), np.zeros((0, 3)), np.array(["a", "b"]), np.full((2, 2), np.nan)],
    ids=["a number", "empty", "text", "nothing finite"],
)
def test_where_there_is_nothing_to_draw(array):
    assert heatmap(array) is None


@given(
    st.lists(st.floats(width=64), min_size=2, max_size=30).map(np.array),
    st.integers(1, 12),
    st.booleans(),
)
def test_any_numbers(array, width, colored):
    picture = heatmap(array, width=width, height=3, colored=colored)
    if picture is None:
        assert not np.isfinite(array).any()
    else:
        rows = picture.plain.split("\n")[:-1]
        assert all(len(row) <= width for row in rows)
        marked = any("!" in row for row in rows)
        assert marked == bool(np.isnan(array).any())
