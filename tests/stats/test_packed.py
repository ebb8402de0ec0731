"""Packed statistics, computed by C and by JAX operations."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensortap.rooms.track.jax import device_stats
from tensortap.rooms.track.packed import HEAD, layout, unpack
from tensortap.stats import summarize_array

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
REAL = [
    "bool", "int8", "int32", "uint16", "uint32", "float16", "bfloat16", "float32",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e8m0fnu",
]  # fmt: skip
in_jax = jax.jit(device_stats.pack_in_jax)
in_any = jax.jit(device_stats.pack)
# compiles twice as fast
unoptimized = jax.jit(device_stats.pack, compiler_options={"xla_backend_optimization_level": 0})


def ways(dtype="float32"):
    """Return both implementations, or one if C has no code for the dtype."""
    return [in_any, in_jax] if dtype in device_stats._IN_C else [unoptimized]


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def summary(pack, array):
    return unpack(np.asarray(pack(array)), array.dtype.name, array.shape)


def any_bits(name, size):
    dtype = dtype_of(name)
    raw = np.random.default_rng(size).integers(0, 256, size * dtype.itemsize, np.uint8)
    return raw.view(dtype) if name != "bool" else raw % 2 == 0


@pytest.mark.parametrize("name", REAL)
def test_any_bits(assert_close, name):
    array = any_bits(name, 2049)
    for pack in ways(name):
        assert_close(summary(pack, array), summarize_array(array), TOLERANCE)


@pytest.mark.parametrize("size", [1, 15, 17, 2048, 70_000])
@pytest.mark.parametrize("name", ["float32", "float16"])
def test_any_size_in_c(assert_close, name, size):
    array = any_bits(name, size)
    assert_close(summary(in_any, array), summarize_array(array), TOLERANCE)
    with np.errstate(all="ignore"):
        array = np.random.default_rng(0).standard_normal(size).astype(array.dtype)
    assert_close(summary(in_any, array), summarize_array(array), TOLERANCE)


@pytest.mark.parametrize("name", ["float64", "uint64"])
def test_64_bits(assert_close, name):
    raw = np.random.default_rng(0).integers(0, 1 << 63, 1000, np.uint64) * np.uint64(2)
    with jax.enable_x64(True):
        array = raw.view(name)
        assert_close(summary(unoptimized, array), summarize_array(array), 1e-9)


FLOATS = st.one_of(
    st.floats(width=32, allow_subnormal=True),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 3.4e38, 1.0]),
)


@given(hnp.arrays(np.float32, st.integers(0, 40), elements=FLOATS))
@example(np.full(33, 1e-45, np.float32))
@example(np.full(33, np.nan, np.float32))
@example(np.array([3e38, 1e-45, -3e38] * 13, np.float32))
@example(np.array([np.inf] * 16 + [1.0], np.float32))
@example(np.array([-0.0], np.float32))
def test_float32_against_fractions(reference, assert_close, array):
    # one shape for all, because compiling takes longest
    padded = np.zeros(40, np.float32)
    padded[: array.size] = array
    for pack in ways():
        assert_close(summary(pack, padded), reference(padded.tolist()), TOLERANCE)


@pytest.mark.parametrize(
    ("scale", "mean"), [(1e-44, 0.0), (1e-38, 1.0), (1.0, 1000.0), (1e38, 0.0)]
)
def test_a_large_mean_and_a_small_deviation(assert_close, scale, mean):
    random = np.random.default_rng(0)
    with np.errstate(over="ignore", under="ignore"):
        array = ((random.standard_normal((100, 333)) + mean) * scale).astype(np.float32)
    for pack in ways():
        assert_close(summary(pack, array), summarize_array(array), TOLERANCE)


def test_counts_beyond_float32():
    array = np.ones((1 << 24) + 3, np.int8)
    assert summary(in_jax, array).exponents == {0: (1 << 24) + 3}


def test_complex_numbers_by_their_magnitude(assert_close):
    array = np.array([3 + 4j, 0, -1j, complex(np.nan, np.inf), complex(np.inf, 1)], np.complex64)
    for pack in ways("complex64"):
        assert_close(summary(pack, array), summarize_array(array), TOLERANCE)


def test_empty_arrays_have_no_figures():
    for name in ("float32", "int8"):
        found = summary(device_stats.pack, np.zeros((0, 3), name))
        assert (found.count, found.bins) == (0, ())
        assert math.isnan(found.mean)


def test_vmap_gives_one_row_per_element():
    x = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    rows = np.asarray(jax.vmap(device_stats.pack)(x))
    for row, array in zip(rows, x, strict=True):
        assert unpack(row, "float32", (50,)) == summary(jax.jit(device_stats.pack), array)


def test_any_layout_in_memory():
    x = jnp.arange(12.0).reshape(3, 4)
    packed = jax.jit(lambda x: device_stats.pack(x.T))(x)
    assert unpack(np.asarray(packed), "float32", (4, 3)) == summary(in_any, np.asarray(x))


def test_zeros_have_no_summary():
    words = np.zeros(layout("float16").words, np.uint32)
    assert unpack(words, "float16", (2,)) is None
    with pytest.raises(ValueError, match="words"):
        unpack(words, "float32", (2,))


def test_rejects_dtypes_without_numbers():
    with pytest.raises(TypeError, match="str"):
        layout("str")
    assert not device_stats.can_reduce(jax.random.key(0).dtype)
    assert layout("int32").words == HEAD + 32
