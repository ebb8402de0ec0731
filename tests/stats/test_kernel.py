"""The C kernel against NumPy: all dtypes, strides, threads, processors."""

from __future__ import annotations

import concurrent.futures
import os
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensortap.stats import numpy_summary, summarize, summarize_array
from tensortap.stats.columns import SummaryColumns

if summarize.kernel is None:
    pytest.skip("the kernel was not built", allow_module_level=True)


kernel = summarize.kernel
DTYPES = [
    *("bool int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()),
    *("float16 float32 float64 complex64 complex128".split()),
    *("bfloat16 float8_e4m3fn float8_e5m2 float6_e2m3fn float4_e2m1fn int4".split()),
]


@pytest.fixture
def every_variant():
    used = kernel.variant()
    yield kernel.variants()
    kernel.use(used)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def sample(name, n, seed=0):
    """Return numbers of a dtype, including its special values."""
    rng = np.random.default_rng(seed)
    dtype = dtype_of(name)
    if dtype.kind in "fc" or dtype.kind == "V":
        with np.errstate(all="ignore"):
            x = (rng.standard_normal(n) * np.exp2(rng.integers(-9, 9, n))).astype(dtype)
            if n > 20:
                x[:3], x[3:6] = np.zeros(3).astype(dtype), np.full(3, 1e-42).astype(dtype)
                x[6:9], x[9:11] = (
                    np.full(3, np.nan).astype(dtype),
                    -np.full(2, np.inf).astype(dtype),
                )
        return x
    if dtype.kind == "b":
        return rng.integers(0, 2, n).astype(dtype)
    if dtype.kind in "iu" and dtype.itemsize > 1:
        edges = np.iinfo(dtype)
        return rng.integers(edges.min, edges.max, n, dtype, endpoint=True)
    return rng.integers(-8 if name == "int4" else 0, 8, n).astype(dtype)


def bits(summary):
    """Return the bits of a summary, because nan is not equal to itself."""
    import msgspec

    return msgspec.msgpack.encode(summary)


@pytest.mark.parametrize("name", DTYPES)
def test_agrees_with_numpy_for_every_dtype(name, assert_close):
    assert summarize.code_of(name) is not None
    for n in (0, 1, 2, 40, 5000, 70_000):
        x = sample(name, n)
        assert_close(summarize_array(x), numpy_summary.summarize_array(x), 1e-11)


@st.composite
def patchworks(draw, bits):
    """Draw long arrays of a few stretches, so that chunks differ and borders are anywhere."""
    floats = st.floats(width=bits) | st.sampled_from([0.0, -0.0, 2.0**-149, 2.0**127, 1.0])
    pieces = []
    for _ in range(draw(st.integers(1, 4))):
        values = draw(st.lists(floats, min_size=1, max_size=6))
        pieces.append(np.resize(np.array(values, f"f{bits // 8}"), draw(st.integers(1, 6000))))
    return np.concatenate(pieces)


@given(patchworks(32) | patchworks(64))
def test_floats_across_chunks(assert_close, x):
    assert_close(summarize_array(x), numpy_summary.summarize_array(x), 1e-11)


@given(
    mean=st.floats(-(2.0**99), 2.0**99, width=32),
    scale=st.floats(2.0**-24, 1.0, width=32),
    n=st.integers(2, 9000),
    seed=st.integers(0, 99),
)
def test_large_mean_small_deviation(mean, scale, n, seed):
    noise = np.random.default_rng(seed).standard_normal(n)
    x = (mean * (1 + scale * noise)).astype(np.float32)
    y = x.astype(np.longdouble)
    s = summarize_array(x)
    assert s.std == pytest.approx(float(y.std(ddof=1)), rel=1e-9)
    assert s.mean == pytest.approx(float(y.mean()), rel=0, abs=1e-9 * s.mean_abs)


@pytest.mark.parametrize("spread", [1, 10, 20, 40, 70, 126])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_exponents_near_and_far(spread, dtype):
    # exponents that need one window, several, or too many; in both orders
    rng = np.random.default_rng(0)
    wide = np.exp2(rng.integers(-spread, spread, 150_000, endpoint=True)).astype(dtype)
    narrow = np.exp2(rng.integers(60, 63, 150_000)).astype(dtype)
    for x in (np.concatenate([wide, narrow]), np.concatenate([narrow, wide])):
        exponents, counts = np.unique(np.frexp(x)[1] - 1, return_counts=True)
        expected = dict(zip(exponents.tolist(), counts.tolist(), strict=True))
        assert summarize_array(x).exponents == expected


def test_every_exponent_of_float64():
    exponents = np.arange(-1074, 1024)
    x = np.resize(np.ldexp(1.0, exponents), 100_000)
    s = summarize_array(-x)
    assert (s.first_bin, len(s.bins), sum(s.bins)) == (-1074, 2098, x.size)
    assert s.exponents == numpy_summary.summarize_array(x).exponents


@pytest.mark.parametrize("name", DTYPES)
def test_all_variants_are_bit_identical(name, every_variant):
    assert every_variant[0] == "baseline"
    for n in (1, 7, 8, 9, 31, 65, 1000, 4095, 4097, 70_001):
        x = sample(name, n, seed=n)
        found = []
        for variant in every_variant:
            kernel.use(variant)
            assert kernel.variant() == variant
            found.append(bits(summarize_array(x)))
        assert len(set(found)) == 1


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "uint8", "int64", "complex64"])
def test_any_number_of_threads_is_bit_identical(name):
    x = np.resize(sample(name, 1_000_003), (3, 700_001))
    for view in (x, x[:, ::2], x.T):
        found = {bits(summarize_array(view, threads=n)) for n in (1, 2, 3, 8, 0)}
        assert len(found) == 1


def memory_of(x):
    strides = None if x.flags.c_contiguous else x.strides
    return x.__array_interface__["data"][0], summarize.kernel_code(x.dtype), x.shape, strides


@pytest.mark.parametrize("threads", [1, 3, 0])
def test_many_arrays_in_one_call_are_bit_identical(threads):
    names = [name for name in DTYPES if name != "complex128"]
    arrays = [sample(name, n, seed=n) for n in (0, 1, 7, 5000, 70_000) for name in names]
    large = sample("float32", 1_100_000)
    far = np.ldexp(1.0, np.arange(-1074, 1024))  # more bins than fit into a small result
    grid = sample("float32", 6000).reshape(60, 100)
    arrays += [large, far, large[:9], large, grid.T, grid[::-3, 5:], grid[:, :0]]
    arrays.append(sample("bfloat16", 300_000))  # by patterns
    arrays.append(np.broadcast_to(grid[:1], (8, 100)))
    columns = SummaryColumns(*kernel.summarize_many([memory_of(x) for x in arrays], threads))
    assert [bits(s) for s in columns.summaries()] == [bits(summarize_array(x)) for x in arrays]
    assert SummaryColumns(*kernel.summarize_many([], threads)).summaries() == []


@pytest.mark.parametrize("wrong", [[(8, 0, 3)], [(0, 0, 3, None)], [(8, 99, 3, None)], None])
def test_many_arrays_reject_wrong_arguments(wrong):
    x = sample("float32", 10)
    arrays = wrong and [memory_of(x), *wrong]
    with pytest.raises((TypeError, ValueError)):
        kernel.summarize_many(arrays, 0)


def test_many_arrays_leave_what_is_no_array_to_the_caller():
    assert kernel.summarize_many([memory_of(sample("float32", 10)), 5], 0) is None


def test_many_arrays_reject_magnitudes_beyond_float64():
    x = np.array([complex(1.7e308, 1.7e308), 1.0])
    with pytest.raises(OverflowError, match="cannot hold"):
        kernel.summarize_many([memory_of(x)], 0)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "int16", "uint16"])
def test_many_16_bit_elements(name, assert_close):
    patterns = np.random.default_rng(0).integers(0, 1 << 16, (1 << 20) + 5, dtype=np.uint16)
    x = patterns.view(dtype_of(name))
    for n in (1000, x.size):
        assert_close(summarize_array(x[:n]), numpy_summary.summarize_array(x[:n]), 1e-11)
    finite = sample(name, 1 << 20)
    assert_close(summarize_array(finite), numpy_summary.summarize_array(finite), 1e-11)


@pytest.mark.slow
@given(
    st.data(),
    hnp.array_shapes(min_dims=1, max_dims=5, max_side=9),
    st.sampled_from(["float32", "bfloat16", "uint8", "float64", "complex128", "int64"]),
)
@settings(max_examples=60)
def test_any_strides(assert_close, data, shape, name):
    x = np.resize(sample(name, 500), shape)
    x = x[data.draw(hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=False))]
    x = np.asarray(x)
    x = x.transpose(data.draw(st.permutations(range(x.ndim))))
    if data.draw(st.booleans()):
        x = np.broadcast_to(x, (3, *x.shape))
    assert_close(summarize_array(x), summarize_array(x.copy()), 1e-12)


@pytest.mark.parametrize("name", ["float32", "float64", "complex128", "int16"])
@pytest.mark.parametrize("n", [10, 9000])
def test_unaligned_memory(name, n):
    x = sample(name, n)
    raw = np.empty(x.nbytes + 1, np.uint8)
    raw[1:] = x.view(np.uint8)
    assert bits(summarize_array(raw[1:].view(x.dtype))) == bits(summarize_array(x))


def test_many_threads_at_once():
    arrays = [sample("float32", n, seed=n) for n in (100, 5000, 20_000, 600_000)] * 4
    want = [bits(summarize_array(x)) for x in arrays]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert [bits(s) for s in pool.map(summarize_array, arrays)] == want


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.slow
def test_after_a_fork():
    x = sample("float32", 3_000_000)
    want = bits(summarize_array(x, threads=2))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if bits(summarize_array(x, threads=2)) == want else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bits(summarize_array(x, threads=2)) == want


def test_without_the_kernel(assert_close, monkeypatch):
    x = sample("bfloat16", 600).reshape(20, 30)[::-2, ::3]
    with_kernel = summarize_array(x)
    monkeypatch.setattr(summarize, "kernel_code", lambda dtype: None)
    assert_close(summarize_array(x), with_kernel, 1e-12)
    assert_close(summarize_array(np.ascontiguousarray(x)), with_kernel, 1e-12)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 0, 3, None, 0), ValueError, "address 0"),
        ((8, 0, (2, -1), None, 0), ValueError, "negative"),
        ((8, 99, 3, None, 0), ValueError, "code 99"),
        ((8, -1, 3, None, 0), ValueError, "code -1"),
        ((8, 0, (2, 2), (4,), 0), ValueError, "differ in length"),
        ((8, 0, (1 << 40, 1 << 40), None, 0), ValueError, "more elements"),
        ((8, 0, (1,) * 65, None, 0), TypeError, "at most 64"),
        ((8, 0, "no", None, 0), TypeError, "tuple"),
        ((8, 0, (2.5,), None, 0), TypeError, "integer"),
        ((8,), TypeError, "address, code, shape"),
    ],
)
def test_rejects_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        kernel.summarize(*arguments)


def test_rejects_wrong_variants_and_tables():
    with pytest.raises(ValueError, match="cannot run the variant abacus"):
        kernel.use("abacus")
    with pytest.raises(ValueError, match="256 float64"):
        kernel.add_table(b"1234")


def test_leaks_no_memory():
    arrays = [sample("float32", 100), sample("uint8", 100), sample("float64", 20_000)]

    def rounds():
        for x in arrays * 200:
            summarize_array(x)
        for _ in range(200):
            kernel.summarize_many([memory_of(x) for x in arrays], 0)

    rounds()
    before = sys.getallocatedblocks()
    rounds()
    assert sys.getallocatedblocks() - before < 50
