"""Merging: the summary of shards is the summary of the whole."""

from __future__ import annotations

import math

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensortap.stats import summarize_array
from tensortap.stats.merge import merge

ODD = [0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1e-45, 1e38, -1e300]
numbers = st.floats(-1e307, 1e307) | st.sampled_from(ODD)
shards = st.lists(st.lists(numbers, max_size=8), min_size=1, max_size=5)


def summary(x):
    return summarize_array(np.array(list(x), np.float64))


def same(a, b):
    """Return whether two summaries are equal, with nan equal to nan."""
    return msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


@given(shards)
@example([[1e-300], [1e300]])
@example([[0.0, 0.0], [5e-324, 0.0]])
@example([[math.nan], [], [2.0]])
@pytest.mark.slow
def test_shards_equal_the_whole(reference, assert_close, parts):
    whole = reference([v for part in parts for v in part])
    assert_close(merge(*map(summary, parts)), whole, 1e-9)


@given(st.tuples(*[st.lists(numbers, max_size=6)] * 3))
def test_neither_grouping_nor_order_matters(assert_close, parts):
    a, b, c = map(summary, parts)
    assert_close(merge(merge(a, b), c), merge(a, merge(b, c)), 1e-9)
    assert_close(merge(a, b, c), merge(c, merge(b, a)), 1e-9)


def test_merging_nothing_gives_the_empty_summary():
    assert same(merge(summary([]), summary([])), summary([]))
    assert same(merge(summary([]), summary([2.0])), summary([2.0]))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int16, np.complex64, bool])
def test_ranks_of_a_large_tensor(dtype, assert_close):
    x = (1000 + 30 * np.random.default_rng(0).standard_normal((8, 40_000))).astype(dtype)
    uneven = [x[:1, :7], x[:1, 7:], x[1:4], x[4:4], x[4:]]
    assert_close(merge(*map(summarize_array, uneven)), summarize_array(x), 1e-9)


def test_equal_constants_stay_constant():
    s = merge(*[summary([0.1] * n) for n in (1, 3, 10)])
    assert (s.mean, s.std, s.min, s.max) == (0.1, 0.0, 0.1, 0.1)


def test_counts_beyond_float64_are_exact():
    part = msgspec.structs.replace(summary([1.0]), count=2**53, bins=(2**53,))
    one = summary([1.0])
    whole = merge(part, one)
    assert (whole.count, whole.bins) == (2**53 + 1, (2**53 + 1,))
