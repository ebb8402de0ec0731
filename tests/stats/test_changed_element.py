"""The one element in which two tensors differ, found by their digests."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.record import Shard
from tensortap.stats.changed_element import changed_element
from tensortap.stats.shard_digest import shard_digest, sums_of


def _changed(a, b, shard=None):
    one, other = (sums_of(shard_digest(each, shard)) for each in (a, b))
    return changed_element(one, other, a.dtype.name, a.itemsize, a.shape, shard)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["float32", "float64", "float16", "int8", "uint16"]),
    st.lists(st.integers(1, 9), max_size=3),
    st.booleans(),
    st.data(),
)
def test_finds_a_flipped_bit(dtype, shape, is_shard, data):
    seed = data.draw(st.integers(0, 99))
    itemsize = np.dtype(dtype).itemsize
    size = int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 256, size * itemsize, np.uint8)
    a = raw.view(dtype).reshape(shape)
    b = a.copy()
    element = data.draw(st.integers(0, size - 1))
    bit = data.draw(st.integers(0, 8 * itemsize - 1))
    b.reshape(-1).view(np.uint8)[element * itemsize + bit // 8] ^= 1 << bit % 8
    at = [int(i) for i in np.unravel_index(element, shape)] if shape else []
    shard = None
    if is_shard and shape:
        shard = Shard((3 * shape[0], *shape[1:]), (shape[0], *(0 for _ in shape[1:])))
        at[0] += shape[0]
    assert _changed(a, b, shard) == (tuple(at), bit)


def test_another_value_and_several():
    a = np.random.default_rng(0).standard_normal((300, 500)).astype("float32")
    b = a.copy()
    b[299, 7] = 0.1
    assert _changed(a, b) == ((299, 7), None)
    b[0, 0] += 1
    assert _changed(a, b) is None
    pair = np.ones(6, np.float16)
    other = pair.copy()
    other[2:4] = 0  # both halves of a word
    assert _changed(pair, other) is None
