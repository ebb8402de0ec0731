"""What NumPy and the kernel must both do."""

from __future__ import annotations

import math
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensortap.stats import numpy_summary, summarize

_NAMES = """bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz
    float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn"""
SMALL_FLOATS = [np.float16, *(getattr(ml_dtypes, name) for name in _NAMES.split())]
SMALL_INTS = [np.bool_, np.int8, np.uint8, np.int16, np.uint16, ml_dtypes.int4, ml_dtypes.uint4]


@pytest.fixture(scope="module", params=["numpy", "kernel"])
def summarize_array(request):
    if request.param == "numpy":
        return numpy_summary.summarize_array
    if summarize.kernel is None:
        pytest.skip("the kernel was not built")
    return summarize.summarize_array


def tiny_to_huge(bits):
    """Return a strategy for any float, and often the difficult ones."""
    special = [0.0, -0.0, math.nan, math.inf, -math.inf, 2.0**-149, 2.0**126, 1.5, 2.0**-126]
    if bits == 64:
        special += [5e-324, -5e-324, 1e300, -1.7e308, 2.0**-1022, 1e-160]
    return st.floats(width=bits) | st.sampled_from(special)


def shapes():
    return hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@pytest.mark.slow
@given(st.data(), shapes(), st.sampled_from([32, 64]))
def test_floats(summarize_array, reference, assert_close, data, shape, bits):
    x = data.draw(hnp.arrays(f"f{bits // 8}", shape, elements=tiny_to_huge(bits)))
    assert_close(summarize_array(x), reference(x.ravel().tolist()), 1e-12)


@pytest.mark.parametrize("mean", [1.0, 1.3e8, -7e15])
def test_deviations_of_a_few_steps_of_float64(summarize_array, reference, assert_close, mean):
    steps = np.rint(100 * np.random.default_rng(0).standard_normal(1000))
    x = mean + np.spacing(abs(mean)) * steps
    assert_close(summarize_array(x), reference(x.tolist()), 1e-12)
    assert summarize_array(x).mean == reference(x.tolist()).mean


def test_deviation_of_one_step_across_chunks(summarize_array):
    x = np.full(200_000, 1.0)
    x[::2] += 2.0**-30
    exact = 2.0**-31 * math.sqrt(x.size / (x.size - 1))
    assert summarize_array(x).std == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", SMALL_FLOATS + SMALL_INTS)
def test_every_bit_pattern(summarize_array, dtype, reference, assert_close):
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        x = np.array([True, False, True])
    elif dtype.name in ("int4", "uint4"):
        low = -8 if dtype.name == "int4" else 0
        x = np.arange(low, low + 16).astype(dtype)
    else:
        x = np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}").view(dtype)
    if x.size > 3000:
        x = x[np.r_[:200, 0 : x.size : 61]]  # fractions are slow
    exact = [float(v) for v in x]
    assert_close(summarize_array(x), reference(exact), 1e-9)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("offset", [-2, -1, 0, 1])
def test_integers_beyond_float64_keep_their_bins(summarize_array, dtype, offset):
    powers = [52, 53, 54, 60, 62] + ([63] if dtype is np.uint64 else [])
    x = np.array([2**p + offset for p in powers], dtype)
    bins = [p - (offset < 0) for p in powers]
    s = summarize_array(x)
    assert s.exponents == {b: bins.count(b) for b in bins}
    assert s.max == float(x.max())


def test_the_most_negative_integer(summarize_array):
    s = summarize_array(np.array([-(2**63), 2**63 - 1, 0], np.int64))
    assert s.exponents == {63: 1, 62: 1}
    assert (s.min, s.max, s.max_abs, s.zeros) == (-(2.0**63), 2.0**63, 2.0**63, 1)


@pytest.mark.slow
@given(hnp.arrays(np.int64, st.integers(0, 30)) | hnp.arrays(np.uint64, st.integers(0, 30)))
@example(np.array([2**63 - 1, 2**53 + 1, -1, 7], np.int64))
def test_64_bit_integers(summarize_array, reference, assert_close, x):
    assert_close(summarize_array(x), reference(x.tolist()), 1e-12)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_by_magnitude(summarize_array, dtype):
    nan, inf = math.nan, math.inf
    x = np.array([3 + 4j, 0, complex(nan, 1), complex(inf, nan), complex(-inf, 1), -2j], dtype)
    s = summarize_array(x)
    assert (s.count, s.zeros, s.nans, s.posinfs, s.neginfs) == (6, 1, 2, 1, 0)
    assert (s.min, s.max, s.exponents) == (0.0, 5.0, {1: 1, 2: 1})
    assert s.mean == pytest.approx(7 / 3)


def test_complex_magnitudes_at_the_ends_of_the_range(summarize_array):
    small = summarize_array(np.array([complex(3e-45, 4e-45)], np.complex64))
    assert small.max == pytest.approx(math.hypot(*np.float32([3e-45, 4e-45]).tolist()), rel=1e-12)
    assert summarize_array(np.array([complex(3e300, 4e300)])).max == pytest.approx(5e300)
    assert summarize_array(np.array([complex(3e-320, 4e-320)])).max == pytest.approx(5e-320, 1e-3)
    beyond = summarize_array(np.array([complex(1.7e308, 1.7e308), 1.0]))
    assert (beyond.posinfs, beyond.finite, beyond.exponents) == (1, 1, {0: 1})  # as in float64


def test_half_complex(summarize_array):
    fields = np.zeros(2, [("real", np.float16), ("imag", np.float16)])
    fields[0] = (3, 4)
    assert summarize_array(fields).max == 5.0
    assert summarize_array(fields).zeros == 1
    # ml_dtypes has names for them since version 0.6
    named = [(np.float16, "complex32"), (ml_dtypes.bfloat16, "bcomplex32")]
    for part, dtype in [(p, getattr(ml_dtypes, d)) for p, d in named if hasattr(ml_dtypes, d)]:
        x = np.array([3, 4, 0, 0]).astype(part).view(dtype)
        assert (summarize_array(x).max, summarize_array(x).zeros) == (5.0, 1)


@pytest.mark.parametrize(
    "x",
    [
        np.array(["2020-01-01"], "M8[D]"), np.array([1], "m8[s]"), np.array(["a"]),
        np.array([None]), np.zeros(2, "V4"), np.zeros(2, [("real", "f4"), ("other", "f4")]),
    ],
)  # fmt: skip
def test_rejects_arrays_without_numbers(summarize_array, x):
    with pytest.raises(TypeError, match=r"no statistics for dtype .* does not hold numbers"):
        summarize_array(x)
    for dtype in (np.longdouble, np.clongdouble):
        with pytest.raises(TypeError, match="its numbers are longer than float64"):
            summarize_array(np.ones(2, dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, ml_dtypes.bfloat16, np.uint8])
def test_empty_arrays_give_nan(summarize_array, dtype):
    s = summarize_array(np.zeros((0, 3), dtype))
    assert (s.count, s.zeros, s.finite, s.bins) == (0, 0, 0, ())
    assert all(math.isnan(f) for f in (s.min, s.max, s.mean, s.std, s.mean_abs, s.max_abs, s.rm8))
    s = summarize_array(np.full(5, np.nan, np.float32))
    assert (s.count, s.nans, s.finite, s.bins) == (5, 5, 0, ())
    assert all(math.isnan(f) for f in (s.min, s.max, s.mean, s.std, s.min_abs, s.rm2, s.rm4))


def test_one_element_and_scalars(summarize_array):
    for x in (np.array(-3.25), np.array([-3.25]), np.float32(-3.25)):
        s = summarize_array(np.asarray(x))
        assert (s.count, s.min, s.max, s.mean, s.std, s.rm8) == (1, -3.25, -3.25, -3.25, 0.0, 3.25)


@pytest.mark.parametrize("value", [0.1, -1e300, 5e-324, 3e38])
def test_constants_have_no_deviation(summarize_array, value):
    s = summarize_array(np.full(150_000, value))
    assert (s.mean, s.std, s.min, s.max) == (value, 0.0, value, value)


def test_any_nonzero_byte_is_true(summarize_array):
    s = summarize_array(np.array([2, 0, 255, 1], np.uint8).view(np.bool_))
    assert (s.zeros, s.max, s.mean, s.exponents) == (1, 1.0, 0.75, {0: 3})


def test_minus_zero_is_zero(summarize_array):
    s = summarize_array(np.array([-0.0, -0.0]))
    assert s.zeros == 2
    assert [math.copysign(1, f) for f in (s.min, s.max, s.min_abs, s.max_abs)] == [1] * 4


def test_figures_that_would_overflow(summarize_array):
    s = summarize_array(np.array([1.7e308, 1.6e308, 1.5e308, -1e300]))
    assert s.mean == pytest.approx(1.2e308)
    assert s.rm4 == pytest.approx(((1.7**4 + 1.6**4 + 1.5**4) / 4) ** 0.25 * 1e308)
    assert s.rm8 == pytest.approx(((1.7**8 + 1.6**8 + 1.5**8) / 4) ** 0.125 * 1e308)
    tiny = summarize_array(np.array([5e-324, 1e-323, 1.5e-323]))
    assert (tiny.mean, tiny.std, tiny.exponents) == (1e-323, 5e-324, {-1074: 1, -1073: 2})


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, ml_dtypes.bfloat16, np.int64, "c32"])
def test_strides_change_nothing(summarize_array, dtype, assert_close):
    rng = np.random.default_rng(0)
    if dtype == "c32":
        x = np.zeros((40, 5000), [("real", np.float16), ("imag", np.float16)])
        x["real"], x["imag"] = rng.standard_normal((2, *x.shape))
    else:
        x = (100 * rng.standard_normal((40, 5000))).astype(dtype)
    views = [x.T, x[::-1], x[:, ::-3], x[3:30, 7:4000], x[:, :1].T, x.reshape(8, 25, -1)[:, ::2].T]
    for view in views:
        assert_close(summarize_array(view), summarize_array(view.copy()), 1e-12)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i2", "i8", "u4", "c8"])
def test_byte_order_changes_nothing(summarize_array, dtype):
    x = np.arange(1, 50).astype(dtype)
    assert summarize_array(x.astype(f">{dtype}")) == summarize_array(x)
    assert summarize_array(x.astype(f">{dtype}")[::2]) == summarize_array(x[::2])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, "u1"])
def test_does_not_write_to_the_array(summarize_array, dtype):
    x = (np.arange(150_000) % 200).astype(dtype)
    x.flags.writeable = False
    before = x.tobytes()
    summarize_array(x)
    assert x.tobytes() == before


def test_counts_flushed_subnormals(summarize_array):
    # the processor then reads subnormals as zeros in this thread
    subnormal = [1e-40, -1e-45, 0.0, 1.0]
    arrays = [
        np.array(subnormal, np.float32),
        np.array(subnormal, ml_dtypes.bfloat16),
        np.array([2.0**-127, 1.0], ml_dtypes.float8_e8m0fnu),
        np.array([5e-324, 0.0, -1e-310, 1.0]),
    ]
    large = np.resize(arrays[1], 1 << 17)
    want = [summarize_array(x) for x in [*arrays, large]]
    got = []

    def flushing():
        assert torch.set_flush_denormal(True)
        got.extend(summarize_array(x) for x in [*arrays, large])
        assert (torch.tensor([1e-40]) * 1).item() == 0.0  # and it still does
        got.append(None)

    thread = threading.Thread(target=flushing)
    thread.start()
    thread.join()
    assert got.pop() is None
    for flushed, normal in zip(got, want, strict=True):
        assert (flushed.zeros, flushed.exponents) == (normal.zeros, normal.exponents)
    assert [s.min_abs for s in got[:3]] == [s.min_abs for s in want[:3]]


def test_ignores_the_error_settings_of_numpy(summarize_array):
    x = np.array([1e-200, 1e-30, np.inf, np.nan, 1e300])
    with np.errstate(all="raise"):
        assert summarize_array(x).nans == 1
        assert summarize_array(x.astype(np.complex128)).nans == 1


def test_numpy_needs_little_memory():
    x = np.random.default_rng(0).standard_normal((1 << 22) + 5).astype(np.float32)
    for view in (x, x[1:].reshape(2, -1)[:, ::2]):
        tracemalloc.start()
        numpy_summary.summarize_array(view)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 << 20
