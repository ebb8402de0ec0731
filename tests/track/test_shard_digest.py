"""Digests that do not depend on the layout: shards add up, and whatever differs shows."""

from __future__ import annotations

import itertools
import os

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.core.record import Shard
from tensortap.rooms.track import shard_digest as module
from tensortap.rooms.track.shard_digest import BLOCK, shard_digest
from tensortap.stats import summarize
from tensortap.stats.shard_digest import add_digests, is_shard_digest

TRIALS = int(os.environ.get("TENSORTAP_TRIALS", "1000"))
DTYPES = ("bool", "uint8", "bfloat16", "float16", "float32", "int64", "float64", "complex128")


def drawn(shape, dtype="float32", seed=0):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, count, np.uint8)
    return raw.view(dtype).reshape(shape)


def in_numpy(array, shard=None):
    """Return the digest as it is without the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "code_of", lambda name: None)
        return shard_digest(array, shard)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_and_numpy_agree(dtype):
    x = drawn((3, 3001), dtype)  # more than one block of bytes
    views = (x, x.T, x[::-1, ::3], x[:, 5:6], x[0, 0], x[:0])
    want = [in_numpy(view) for view in views]
    assert len(set(want)) == len(views)
    kernel = summarize.kernel
    used = kernel.variant() if kernel is not None else None
    try:
        for variant in kernel.variants() if kernel is not None else ():
            kernel.use(variant)
            assert [shard_digest(view) for view in views] == want, variant
    finally:
        if used is not None:
            kernel.use(used)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_digests_of_shards_add_up(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    whole = drawn(shape, dtype, seed=1)
    cuts = [
        sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape
    ]
    parts = []
    for corner in itertools.product(*(itertools.pairwise(each) for each in cuts)):
        part = whole[tuple(slice(*each) for each in corner)]
        shard = Shard(shape, tuple(start for start, _ in corner))
        parts.append(shard_digest(part, shard))
        assert parts[-1] == shard_digest(part.copy(), shard)
    assert add_digests(parts) == shard_digest(whole)
    assert in_numpy(part, shard) == parts[-1]


def test_knows_dtype_shape_stack_and_byte_order():
    x = drawn((4, 6))
    same_bytes = (x, x.view("int32"), x.reshape(6, 4), x.reshape(24), x.reshape(4, 1, 6))
    assert len({shard_digest(each) for each in same_bytes}) == 5
    assert shard_digest(x.astype(">f4")) == shard_digest(x)
    rows = [shard_digest(x[i], Shard((4, 6), (i, 0))) for i in range(4)]  # one of a stack
    assert add_digests(rows) == shard_digest(x)
    assert len({shard_digest(np.zeros(n, d)) for n in (0, 1, 2) for d in "fdiq"}) == 12
    assert is_shard_digest(rows[0])
    assert not is_shard_digest(rows[0][:16])
    assert shard_digest(np.array([0.0])) != shard_digest(np.array([-0.0]))
    with pytest.raises(ValueError, match=r"an array of shape \[4, 6\] is no part of Shard"):
        shard_digest(x, Shard((4, 6), (1, 0)))


def bit_flipped(x, random):
    bits = x.view(np.uint32)
    bits[random.integers(x.size)] ^= np.uint32(1) << np.uint32(random.integers(32))


def two_signs_flipped(x, random):
    x[random.choice(x.size, 2, replace=False)] *= -1


def constant_added(x, random):
    x += random.standard_normal(dtype=np.float32)


def swapped(x, random):
    i, j = random.choice(x.size, 2, replace=False)
    x[i], x[j] = x[j], x[i]


def shifted(x, random):
    x[:] = np.roll(x, 1 + random.integers(x.size - 1))


def rows_swapped(x, random):
    rows = x.reshape(64, -1)
    two = random.choice(len(rows), 2, replace=False)
    rows[two] = rows[two[::-1]]


def blocks_permuted(x, random):
    blocks = x.reshape(-1, BLOCK // 4)
    blocks[:] = random.permutation(blocks)


def rectangle_swapped(x, random):
    """Exchange opposite corners of a rectangle, which sums of weaker keys do not see."""
    rows = x.reshape(-1, BLOCK // 4)
    (a, b), (c, d) = (random.choice(size, 2, replace=False) for size in rows.shape)
    rows[a, c] = rows[b, d] = 1.0
    rows[a, d] = rows[b, c] = 2.0
    before = shard_digest(x)
    rows[a, c] = rows[b, d] = 2.0
    rows[a, d] = rows[b, c] = 1.0
    assert shard_digest(x) != before


@pytest.mark.attack("a different tensor with the same digest")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "change",
    [
        bit_flipped, two_signs_flipped, constant_added, swapped, shifted,
        rows_swapped, blocks_permuted, rectangle_swapped,
    ],
)  # fmt: skip
def test_no_collisions(change):
    """`TENSORTAP_TRIALS=1000000` was run for each without a collision."""
    random = np.random.default_rng(0)
    start = random.standard_normal(BLOCK).astype(np.float32)
    digests, contents = set(), set()

    def add(x):
        digests.add(shard_digest(x))
        contents.add(xxhash.xxh3_128_digest(x))

    for _ in range(TRIALS):
        x = start.copy()
        x[0] = random.standard_normal()
        add(x)
        change(x, random)
        add(x)
    assert len(digests) == len(contents)


def test_zeros_of_different_lengths():
    zeros = np.zeros(TRIALS, np.float32)
    assert len({shard_digest(zeros[:n]) for n in range(TRIALS)}) == TRIALS
