"""Histograms of all values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.rooms.figures.reals import counts_of
from tensortap.rooms.films.style import THEME
from tests.films.filming import draw, near

ACCENT = THEME.accent


@pytest.mark.slow
@given(st.lists(st.floats(-8, 8, width=16), max_size=60), st.integers(1, 16))
def test_counts_agree_with_numpy(values, bins):
    # quarters: rounding moves no value into another bin
    x = np.round(np.array(values, np.float64) * 4) / 4
    assert counts_of(x, (-8.0, 8.0), bins).sum() == len(x)
    expected = np.histogram(x, 16, (-8, 8))[0]
    assert counts_of(x, (-8.0, 8.0), 16).tolist() == expected.tolist()


def heights(frame):
    """Return the heights of the bars, from left to right."""
    rows = near(frame, ACCENT, 5)[50:430]
    return rows.sum(axis=0)


def test_heights_of_bars_are_the_counts():
    x = np.repeat(np.arange(4), [10, 20, 40, 5])
    found = heights(draw(x, mode="histogram"))
    bars = [
        found[found > 0][i] for i in np.linspace(20, np.count_nonzero(found) - 20, 4).astype(int)
    ]
    assert np.array(bars) / max(bars) == pytest.approx([0.25, 0.5, 1.0, 0.125], abs=0.02)


def test_shows_a_single_outlier():
    x = np.zeros(100_000)
    x[5] = 100.0
    found = heights(draw(x, mode="histogram"))
    assert np.flatnonzero(found).max() - np.flatnonzero(found).min() > 500
