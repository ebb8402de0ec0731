"""Ranges that follow a tensor, and round numbers beside them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap import TensortapError
from tensortap.films.scales import Follower, opened, ticks, whole_ticks

finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=8), st.booleans())
def test_a_range_that_follows_leaves_nothing_out_and_has_a_length(pairs, symmetric):
    follower = Follower("follow")
    for pair in pairs:
        low, high = sorted(max(-8.9e307, min(8.9e307, x)) for x in pair)
        first, last = follower.next(low, high, symmetric=symmetric)
        assert first <= low
        assert high <= last
        assert 0 < last - first < math.inf
        assert not symmetric or first == pytest.approx(-last)


def test_the_rules():
    fixed, exact = Follower("fixed"), Follower("exact")
    assert fixed.next(math.nan, math.nan) == (0.0, 1.0)
    assert [fixed.next(0, 2), fixed.next(-9, 9)] == [(0, 2), (0, 2)]
    assert [exact.next(0, 2), exact.next(5, 6), exact.next(math.nan, math.nan)] == [
        (0, 2), (5, 6), (5, 6),
    ]  # fmt: skip
    assert Follower((-1, 1)).next(5, 6) == (-1.0, 1.0)


@pytest.mark.parametrize("rule", ["nearly", (1, 1), (2, 1), (0, math.inf), (1, 2, 3)])
def test_what_is_no_range_is_refused(rule):
    with pytest.raises(TensortapError, match="range="):
        Follower(rule)


@given(finite, finite, st.integers(1, 12))
def test_ticks_are_few_different_and_within(a, b, most):
    low, high = opened(*sorted((a / 4, b / 4)))
    found = ticks(low, high, most)
    assert len(found) <= most
    slack = (high - low) * 1e-6
    assert all(low - slack <= value <= high + slack for value, _ in found)


def test_ticks_that_differ_are_written_differently():
    for low, high in ((-1.2, 1.3), (0, 1e-9), (1e6, 1.0001e6), (99999, 100001), (-3e300, 3e300)):
        words = [text for _, text in ticks(low, high, 6)]
        assert len(set(words)) == len(words) >= 2, words


@given(st.integers(1, 10**6), st.integers(1, 20))
def test_ticks_of_cells_are_cells(count, most):
    found = whole_ticks(count, most)
    assert found[0] == 0
    assert found[-1] < count
    assert len(found) <= most
