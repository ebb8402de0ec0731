"""Digests that JAX computes are those of the kernel."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tensortap.core.record import Shard
from tensortap.stats.shard_digest import add_digests, shard_digest
from tensortap.values.jax.device_digest import can_digest, digest_later

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "bfloat16", "float16", "float32", "int32", "complex64"]
)
def test_operations_of_jax_give_the_digest_of_the_kernel(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    random = np.random.default_rng(0)
    raw = random.integers(0, 2 if dtype.kind == "b" else 256, 3 * 3001 * dtype.itemsize, np.uint8)
    whole = raw.view(dtype).reshape(3, 3001)
    assert digest_later(jnp.asarray(whole)).resolve() == shard_digest(whole)
    parts = [
        digest_later(jnp.asarray(part), Shard((3, 3001), (0, start))).resolve()
        for start, part in ((0, whole[:, :700]), (700, whole[:, 700:]))
    ]
    assert add_digests(parts) == shard_digest(whole)
    assert digest_later(jnp.asarray(whole[:0])).resolve() == shard_digest(whole[:0])


def test_wide_numbers():
    with jax.enable_x64(True):
        whole = np.random.default_rng(0).standard_normal((5, 7))
        assert digest_later(jnp.asarray(whole)).resolve() == shard_digest(whole)


def test_large_arrays_are_left_to_the_host():
    assert can_digest(np.empty(8), None)
    assert not can_digest(np.empty(8), Shard((1 << 33,), (0,)))
