"""The C kernel matches exact arithmetic."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.rooms.compare import tensors
from tensortap.rooms.compare.tensors import coarser, compare_arrays, format_of
from tests.compare import reference
from tests.compare.reference import FLOATS, INTS, dtype_of


def floats_of(dtype):
    """Any bit pattern: zeros of both signs, subnormals, infinities and NaN among them."""
    size = dtype.itemsize * 8
    bits = st.integers(0, 2**size - 1).map(lambda n: np.array([n], f"u{size // 8}").view(dtype)[0])
    usual = st.floats(-8, 8, width=16).map(lambda x: np.array([x]).astype(dtype)[0])
    return st.one_of(bits, usual)


def ints_of(dtype):
    if dtype.kind == "b":
        return st.booleans()
    info = ml_dtypes.iinfo(dtype)
    low, high = int(info.min), int(info.max)
    return st.one_of(
        st.integers(low, high), st.sampled_from([low, high, max(low, high - 1), high // 2, 0])
    )


@st.composite
def arrays(draw, name, n):
    dtype = dtype_of(name)
    found = np.empty(n, dtype)
    for i in range(n):
        found[i] = draw(ints_of(dtype) if name in INTS else floats_of(dtype))
    return found


@st.composite
def pairs(draw):
    first = draw(st.sampled_from(FLOATS + INTS))
    second = draw(st.one_of(st.just(first), st.sampled_from(FLOATS + INTS)))
    n = draw(st.integers(0, 8))
    a, b = draw(arrays(first, n)), draw(arrays(second, n))
    if first == second:  # some of them equal
        same = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool)
        b[same] = a[same]
    return a, b


TOLERANCES = st.one_of(st.sampled_from([0.0, 1e-8, 1e-5, 0.1, 1.0]), st.floats(0, 10))


def check(found, wanted, exact):
    # whole numbers of 64 bits: the difference is rounded twice
    near = {"rel": 0 if exact else 1e-15, "abs": 0}
    assert found.pairs == wanted.pairs
    assert found.finite == wanted.finite
    assert found.nonfinite == wanted.nonfinite
    assert found.first_nonfinite == wanted.first_nonfinite
    assert found.mismatches == wanted.mismatches
    assert found.max_abs == pytest.approx(wanted.max_abs, **near)
    assert found.max_rel == pytest.approx(wanted.max_rel, **near)
    assert found.factor == pytest.approx(wanted.factor, rel=near["rel"], abs=near["rel"])
    if exact:
        assert found.worst == wanted.worst
    if math.isfinite(wanted.max_abs):
        assert found.mean_abs == pytest.approx(wanted.mean_abs, rel=1e-12, abs=5e-324)
        if wanted.mean_rel is not None:
            assert found.mean_rel == pytest.approx(wanted.mean_rel, rel=1e-12, abs=5e-324)
        assert found.rel_l2 == pytest.approx(wanted.rel_l2, rel=1e-9, abs=1e-320)
    if not found.identical:
        assert found.cosine == pytest.approx(wanted.cosine, rel=1e-9, abs=1e-12)
    else:
        assert found.cosine == 1.0


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(pair=pairs(), atol=TOLERANCES, rtol=TOLERANCES, equal_nan=st.booleans())
def test_figures_match_their_definitions(pair, atol, rtol, equal_nan):
    a, b = pair
    if all(each.dtype.name in ("int64", "uint64") for each in pair):
        atol = rtol = 0.0  # a difference that is rounded twice may be at the limit
    with np.errstate(all="ignore"):
        found = compare_arrays(a, b, atol=atol, rtol=rtol, equal_nan=equal_nan)
        wanted = reference.compare(a, b, atol=atol, rtol=rtol, equal_nan=equal_nan)
    check(found, wanted, exact=not any(x.dtype.name in ("int64", "uint64") for x in pair))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64"])
def test_result_is_independent_of_threads_and_processor(dtype):
    rng = np.random.default_rng(0)
    a = (rng.standard_normal(1_500_007) * 100).astype(dtype_of(dtype))
    b = a.copy()
    b[700_000:] = (b[700_000:].astype(np.float64) * 1.01).astype(b.dtype)
    found = set()
    before = tensors.kernel.variants()
    try:
        for variant in before:
            tensors.kernel.use(variant)
            for threads in (1, 2, 3, 5):
                found.add(compare_arrays(a, b, atol=1e-8, rtol=1e-5, equal_nan=True,
                                         threads=threads))  # fmt: skip
    finally:
        tensors.kernel.use(before[-1])
    assert len(found) == 1
    assert found.pop().mismatches > 200_000


@pytest.mark.parametrize("at", [0, 1023, 1024, 32 * 1024 - 1, 32 * 1024, 99_999])
def test_finds_one_differing_element(at):
    a = np.random.default_rng(0).standard_normal(100_000)
    a[[5, 50_000]] = np.nan, np.inf
    b = a.copy()
    b[at] += 1.0
    found = compare_arrays(a, b, atol=0.0, rtol=0.0, equal_nan=True)
    wanted = a[np.isfinite(a)]
    assert (found.mismatches, found.worst, found.finite) == (1, at, 99_998)
    d = abs(a[at] - b[at])
    assert found.mean_abs == pytest.approx(d / 99_998, rel=1e-12)
    other = b[np.isfinite(b)]
    cosine = wanted @ other / np.linalg.norm(wanted) / np.linalg.norm(other)
    assert found.cosine == pytest.approx(cosine, rel=1e-12)


def test_equal_bytes_need_no_arithmetic():
    a = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    a[3] = np.nan
    found = compare_arrays(a, a.copy(), atol=0.0, rtol=0.0, equal_nan=True)
    assert found.identical
    assert (found.mismatches, found.max_abs, found.cosine) == (0, 0.0, 1.0)
    found = compare_arrays(a, a.copy(), atol=0.0, rtol=0.0, equal_nan=False)
    assert (found.identical, found.mismatches, found.first_nonfinite) == (0, 1, 3)


def layouts(x):
    yield "turned", x.transpose(2, 0, 1)
    yield "backwards", x[::-1, :, ::-1]
    yield "every other", x[:, ::2]
    yield "repeated", np.broadcast_to(x[:1], x.shape)
    raw = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.uint8)
    unaligned = np.ndarray(x.shape, x.dtype, raw.data)
    unaligned[...] = x
    yield "unaligned", unaligned
    yield "swapped", x.astype(x.dtype.newbyteorder())


def test_result_is_independent_of_strides():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 20, 10)).astype(np.float32)
    y = x + np.float32(1e-3) * rng.standard_normal(x.shape).astype(np.float32)
    for (name, a), (_, b) in zip(layouts(x), layouts(y), strict=True):
        plain = [np.array(each, np.float32) for each in (a, b)]
        rules = {"atol": 1e-8, "rtol": 1e-3, "equal_nan": True}
        wanted = compare_arrays(*plain, **rules)
        for p, q in ((a, b), (a, plain[1]), (plain[0], b)):
            found = compare_arrays(p, q, **rules)
            for field, one, other in zip(found._fields, found, wanted, strict=True):
                assert one == pytest.approx(other, rel=1e-12), (name, field)


@pytest.mark.parametrize("name", FLOATS)
def test_ulps_count_representable_numbers(name):
    """Of the small formats all numbers are written down, of the others one walks."""
    dtype = dtype_of(name)
    rules = {"atol": 0.0, "rtol": 0.0, "equal_nan": True}
    rng = np.random.default_rng(0)
    if dtype.itemsize <= 2:
        bits = np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}")
        if name.startswith(("float6", "float4")):
            bits = bits[: 1 << (6 if name.startswith("float6") else 4)]
        with np.errstate(all="ignore"):
            every = np.unique(bits.view(dtype).astype(np.float64))
        if name == "float8_e8m0fnu":
            every = np.concatenate([[2.0**-127], every[every > 2.0**-127]])
        every = every[np.isfinite(every)]
        for _ in range(50):
            i, j = rng.integers(0, every.size, 2)
            a, b = every[[i]].astype(dtype), every[[j]].astype(dtype)
            if float(a[0]) != every[i] or float(b[0]) != every[j]:
                continue  # ml_dtypes goes through float32, which flushes none of these but one
            assert compare_arrays(a, b, **rules).ulps == abs(int(i) - int(j))
        return
    for start in (1.0, -2.5, 0.0, np.finfo(dtype).tiny, np.finfo(dtype).max):
        a = b = np.array([start], dtype)
        for k in range(1, 10):
            b = np.nextafter(b, np.array([-1e30], dtype))
            assert compare_arrays(a, b, **rules).ulps == k


def test_ulps_use_the_coarser_dtype():
    rules = {"atol": 0.0, "rtol": 0.0, "equal_nan": True}
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        coarse = x.astype(dtype_of(name))
        assert compare_arrays(x, coarse, **rules).ulps == 0  # it is the nearest
        assert compare_arrays(coarse, x, **rules).ulps == 0
    assert (
        compare_arrays(np.float32([1.0]), np.array([1.0078125], ml_dtypes.bfloat16), **rules).ulps
        == 1
    )
    assert compare_arrays(np.array([3]), np.array([3.0], np.float16), **rules).ulps == 0
    assert coarser(dtype_of("bfloat16"), dtype_of("float16")) == format_of(dtype_of("bfloat16"))


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e-160, 1e160, 1e300])
def test_squares_beyond_float64(scale):
    rng = np.random.default_rng(0)
    x, y = rng.integers(-9, 10, (2, 5000)).astype(float)
    plain = compare_arrays(x, y, atol=0.0, rtol=0.5, equal_nan=True)
    found = compare_arrays(x * scale, y * scale, atol=0.0, rtol=0.5, equal_nan=True)
    # subnormal numbers have few digits
    assert found.cosine == pytest.approx(plain.cosine, rel=1e-3 if scale < 1e-310 else 1e-12)
    assert found.rel_l2 == pytest.approx(plain.rel_l2, rel=1e-3 if scale < 1e-310 else 1e-12)
    if scale > 1e-310:
        assert found.mean_abs == pytest.approx(plain.mean_abs * scale, rel=1e-12)


def test_subnormals_count_under_flush_denormal():
    torch = pytest.importorskip("torch")
    a = np.full(2000, 1e-41, np.float32)
    b = np.full(2000, 2e-41, np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        found = compare_arrays(a, b, atol=0.0, rtol=0.0, equal_nan=True)
    finally:
        torch.set_flush_denormal(False)
    assert found.mismatches == 2000
    assert found.max_rel == pytest.approx(0.5, rel=1e-3)


def test_kernel_checks_its_arguments():
    x = np.zeros(3)
    side = (x.ctypes.data, tensors.kernel.FLOAT64, x.strides)
    rest = (0.0, 0.0, True, (53, -1022, 1.7e308), 1)
    with pytest.raises(ValueError, match="code"):
        tensors.kernel.compare((side[0], 99, (8,)), side, (3,), *rest)
    with pytest.raises(ValueError, match="code"):
        tensors.kernel.compare((side[0], -1, (8,)), side, (3,), *rest)
    with pytest.raises(ValueError, match="complex"):
        tensors.kernel.compare((side[0], tensors.kernel.COMPLEX64, (8,)), side, (3,), *rest)
    with pytest.raises(ValueError, match="length"):
        tensors.kernel.compare(side, (side[0], side[1], ()), (3,), *rest)
    with pytest.raises(ValueError, match="negative"):
        tensors.kernel.compare(side, side, (-3,), *rest)
    with pytest.raises(ValueError, match="address 0"):
        tensors.kernel.compare((0, side[1], (8,)), side, (3,), *rest)
    with pytest.raises(ValueError, match="digits"):
        tensors.kernel.compare(side, side, (3,), 0.0, 0.0, True, (54, 0, 0.0), 1)
    with pytest.raises(TypeError):
        tensors.kernel.compare(side, side, [3], *rest)
    with pytest.raises(ValueError, match="256"):
        tensors.kernel.add_table(b"few")
    with pytest.raises(ValueError, match="no such thing"):
        tensors.kernel.use("no such thing")
