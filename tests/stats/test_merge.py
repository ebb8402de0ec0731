"""Merging: the summary of shards is the summary of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensortap.core.record import Summary
from tensortap.stats import summarize_array
from tensortap.stats.merge import merge

Reference = Callable[[Iterable[float]], Summary]
AssertClose = Callable[[Summary, Summary, float], None]

ODD = [0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1e-45, 1e38, -1e300]
numbers = st.floats(-1e307, 1e307) | st.sampled_from(ODD)
shards = st.lists(st.lists(numbers, max_size=8), max_size=5)


def summary(x: Iterable[float]) -> Summary:
    return summarize_array(np.array(list(x), np.float64))


def same(a: Summary, b: Summary) -> bool:
    """Return whether two summaries are equal, with nan equal to nan."""
    return msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


@given(shards)
@example([[1e-300], [1e300]])
@example([[0.0, 0.0], [5e-324, 0.0]])
@example([[math.nan], [], [2.0]])
@pytest.mark.slow
def test_shards_equal_the_whole(
    reference: Reference, assert_close: AssertClose, parts: list[list[float]]
) -> None:
    whole = reference([v for part in parts for v in part])
    assert_close(merge(*map(summary, parts)), whole, 1e-9)


@given(st.lists(numbers, max_size=6), st.lists(numbers, max_size=6))
def test_order_does_not_matter(assert_close: AssertClose, a: list[float], b: list[float]) -> None:
    assert_close(merge(summary(a), summary(b)), merge(summary(b), summary(a)), 1e-12)


@given(st.tuples(*[st.lists(numbers, max_size=6)] * 3))
def test_grouping_does_not_matter(
    assert_close: AssertClose, parts: tuple[list[float], list[float], list[float]]
) -> None:
    a, b, c = map(summary, parts)
    assert_close(merge(merge(a, b), c), merge(a, merge(b, c)), 1e-9)
    assert_close(merge(a, b, c), merge(a, merge(b, c)), 1e-9)


@given(st.lists(numbers, max_size=8))
def test_empty_summaries_change_nothing(assert_close: AssertClose, x: list[float]) -> None:
    s = summary(x)
    assert_close(merge(s, summary([])), s, 1e-12)
    assert_close(merge(summary([]), s), s, 1e-12)
    assert_close(merge(s), s, 1e-12)


def test_merging_nothing_gives_the_empty_summary() -> None:
    assert same(merge(), summary([]))
    assert same(merge(summary([]), summary([])), summary([]))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int16, np.complex64, bool])
def test_ranks_of_a_large_tensor(dtype: Any, assert_close: AssertClose) -> None:
    x = (1000 + 30 * np.random.default_rng(0).standard_normal((8, 40_000))).astype(dtype)
    uneven = [x[:1, :7], x[:1, 7:], x[1:4], x[4:4], x[4:]]
    assert_close(merge(*map(summarize_array, uneven)), summarize_array(x), 1e-9)


def test_equal_constants_stay_constant() -> None:
    s = merge(*[summary([0.1] * n) for n in (1, 3, 10)])
    assert (s.mean, s.std, s.min, s.max) == (0.1, 0.0, 0.1, 0.1)


def test_counts_beyond_float64_are_exact() -> None:
    part = msgspec.structs.replace(summary([1.0]), count=2**53, bins=(2**53,))
    one = summary([1.0])
    whole = merge(part, one)
    assert (whole.count, whole.bins) == (2**53 + 1, (2**53 + 1,))


def test_figures_beyond_float64_become_infinite() -> None:
    beyond = summarize_array(np.array([complex(1.7e308, 1.7e308)]))
    s = merge(beyond, summary([1.0]))
    assert (s.count, s.max, s.rm8) == (2, math.inf, math.inf)
