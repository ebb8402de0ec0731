"""Ranges and ticks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.rooms.figures.reals import nonempty
from tensortap.rooms.films.style import RangeFollower, cell_ticks, ticks

finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=8), st.booleans())
def test_following_range_covers_all_values(pairs, symmetric):
    follower = RangeFollower("follow")
    for pair in pairs:
        low, high = sorted(max(-8.9e307, min(8.9e307, x)) for x in pair)
        first, last = follower.next(low, high, symmetric=symmetric)
        assert first <= low
        assert high <= last
        assert 0 < last - first < math.inf
        assert not symmetric or first == pytest.approx(-last)


def test_rules_of_ranges():
    follower = RangeFollower("follow")
    assert follower.next(math.nan, math.nan) == (0.0, 1.0)
    assert follower.next(0, 2) == follower.next(math.nan, math.nan) == (0, 2)
    assert RangeFollower((-1, 1)).next(5, 6) == (-1.0, 1.0)


@given(finite, finite, st.integers(1, 12))
def test_ticks_are_few_and_within_the_range(a, b, most):
    low, high = nonempty(*sorted((a / 4, b / 4)))
    found = ticks(low, high, most)
    assert len(found) <= most
    slack = (high - low) * 1e-6
    assert all(low - slack <= value <= high + slack for value, _ in found)


def test_texts_of_ticks_are_distinct():
    for low, high in ((-1.2, 1.3), (0, 1e-9), (1e6, 1.0001e6), (99999, 100001), (-3e300, 3e300)):
        words = [text for _, text in ticks(low, high, 6)]
        assert len(set(words)) == len(words) >= 2, words


@given(st.integers(1, 10**6), st.integers(1, 20))
def test_cell_ticks_are_cells(count, most):
    found = cell_ticks(count, most)
    assert found[0] == 0
    assert found[-1] < count
    assert len(found) <= most
