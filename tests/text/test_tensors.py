from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.stats import summarize_array
from tensortap.text.tensors import describe_array, number, short, short_dtype, sketch, styled

nan, inf = np.nan, np.inf


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array(3.25, np.float32), "f32 3.25"),
        (np.array(nan, np.float32), "f32 NaN!"),
        (
            np.array([[-2, 0.5, 1]], ml_dtypes.bfloat16),
            "[1, 3] bf16 x∈[-2 █·····██ 1] μ=-0.167 σ=1.61",
        ),
        (
            np.array([1, nan, nan, inf, -inf, 2], np.float32),
            "[6] f32 x∈[1 █······█ 2] μ=1.5 σ=0.707 NaN 2! +Inf 1! -Inf 1!",
        ),
        (np.full(4, nan, np.float16), "[4] f16 all NaN 4!"),
        (np.array([nan, inf]), "[2] f64 NaN 1! +Inf 1!"),
        (np.zeros((4, 4), np.float32), "[4, 4] f32 all zeros"),
        (np.zeros((0, 3), np.float32), "[0, 3] f32 empty"),
        (np.full(10, 0.1, np.float32), "[10] f32 all 0.1"),
        (np.array([0, 0, inf], np.float32), "[3] f32 x=0 +Inf 1!"),
        (np.array([True, False, False, True, True, False, False, False]), "[8] bool 37.5% True"),
        (np.ones(3, np.bool_), "[3] bool all True"),
        (np.arange(10), "[10] i64 x∈[0 █████ 9] μ=4.5 σ=3.03"),
        (np.array([-1, 0, 0, 1], np.int8), "[4] i8 x∈[-1 ▄█▄ 1] μ=0 σ=0.816"),
        (np.array([0, 50256], np.uint32), "[2] u32 x∈[0 █······█ 50256] μ=25128 σ=35536"),
        (np.array(123456789), "i64 123456789"),
        (np.array([3 + 4j, 0], np.complex64), "[2] c64 |z|∈[0 █······█ 5] μ=2.5 σ=3.54"),
        (np.array(3 + 4j), "c128 |z|=5"),
        (np.array([-1.7e308, 0, 1.7e308]), "[3] f64 x∈[-1.7e308 █···█··█ 1.7e308] μ=0 σ=1.7e308"),
        (np.array([1, 2], ml_dtypes.float8_e4m3fn), "[2] f8e4m3 x∈[1 █······█ 2] μ=1.5 σ=0.707"),
        (np.array(["2020-01-01"], "M8[s]"), "[1] datetime64[s]"),
    ],
)
def test_lines(array, expected):
    assert describe_array(array) == expected


def test_the_tensor_that_an_array_stands_for():
    parts = np.zeros(2, [("real", np.float16), ("imag", np.float16)])
    parts["real"] = [1, 2]
    described = describe_array(parts, "complex32", (1, 2))
    assert described == "[1, 2] c32 |z|∈[1 █······█ 2] μ=1.5 σ=0.707"


def test_dtypes_that_only_numpy_has():
    swapped = np.array([3 + 4j, 0], ">c8")
    assert describe_array(swapped, ">c8") == "[2] >c64 |z|∈[0 █······█ 5] μ=2.5 σ=3.54"
    assert describe_array(np.array(2**40, ">i8"), ">i8") == ">i64 1099511627776"
    assert describe_array(np.array([2], np.longdouble), "<f16") == "[1] <f16"


def test_nearly_all_is_not_all():
    x = np.ones(1_000_000, np.bool_)
    x[0] = False
    assert describe_array(x) == "[1000000] bool >99.9% True"
    assert describe_array(~x) == "[1000000] bool 1e-4% True"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("float64", "f64"), ("bfloat16", "bf16"), ("float8_e4m3fn", "f8e4m3"),
        ("float8_e4m3", "f8e4m3ieee"), ("float8_e4m3fnuz", "f8e4m3fnuz"),
        ("float8_e8m0fnu", "f8e8m0"), ("float4_e2m1fn", "f4e2m1"), ("int64", "i64"),
        ("uint8", "u8"), ("bool", "bool"), ("complex64", "c64"), ("bcomplex32", "bc32"),
        (">f4", ">f32"), ("<c32", "c256"), ("<M8[ns]", "<M8[ns]"),
    ],
)  # fmt: skip
def test_short_dtypes(name, expected):
    assert short_dtype(name) == expected


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0.0, "0"), (-0.0, "0"), (2.345678, "2.35"), (0.000999999, "0.001"),
        (0.00012345, "1.23e-4"), (99999.9, "1e5"), (123456.0, "1.23e5"), (1.7976e308, "1.8e308"),
        (nan, "NaN"), (-inf, "-Inf"),
    ],
)  # fmt: skip
def test_numbers(x, expected):
    assert number(x) == expected


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_near_what_they_stand_for(x):
    # the step of float64 near zero is coarser than three digits
    assert float(number(x)) == pytest.approx(x, rel=5.1e-3, abs=1e-321) or abs(x) > 1.79e308
    assert len(number(x)) <= 10


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "True"), (None, "None"), (2**64 - 1, "18446744073709551615"),
        (-(10**300), "int of 997 bits"), (2.302585093, "2.30259"), (1 - 2j, "1-2j"),
        (0.5j, "0+0.5j"), ("two\nlines", r"'two\nlines'"), ("x" * 100, f"'{'x' * 60}'… (100)"),
        (b"\x00a", r"b'\x00a'"), ({"a": 1}, "<dict>"),
    ],
)  # fmt: skip
def test_short_values(value, expected):
    assert short(value) == expected


def draw(x, width=8):
    array = np.asarray(x)
    return sketch(array, summarize_array(array), width)


def test_blocks_stand_for_shares():
    assert draw(np.repeat(np.arange(8.0), np.arange(1, 9))) == "▁▂▃▄▅▆▇█"
    assert draw(np.repeat([0.0, 1.0], [1000, 1])) == "█······▁"


def test_no_sketch_where_there_is_nothing_to_see():
    assert [draw(x) for x in ([], [nan], [2.0, 2.0], [True, False], [inf, 1.0])] == [""] * 5


def test_a_sample_sees_all_columns():
    x = np.zeros((65_536, 16), np.float32)
    x[:, 1:] = 1.0  # a step of 16 would only see the zeros
    assert draw(x) == "▁······█"
    assert draw(x[:, ::-1].T) == "▁······█"


def test_a_sample_has_both_ends():
    x = np.full(1_000_000, 0.5, np.float32)
    x[1], x[-2] = 0.0, 1.0
    assert draw(x) == "▁···█··▁"


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "c8", ml_dtypes.bfloat16])
def test_a_sketch_of_any_dtype(dtype):
    x = np.repeat(np.arange(8), np.arange(1, 9)).astype(dtype)
    assert draw(x) == "▁▂▃▄▅▆▇█"
    if np.dtype(dtype).isbuiltin == 1:
        assert draw(x.astype(x.dtype.newbyteorder(">"))) == "▁▂▃▄▅▆▇█"


def colours(plain):
    styled_line = styled(plain)
    assert styled_line.plain == plain
    return {plain[s.start : s.end]: str(s.style) for s in styled_line.spans}


def test_colours():
    assert colours("[2, 3] bf16 x∈[-2.1 ▁▂·█ 2.6] μ=0.01 σ=0.5 NaN 12! -Inf 3!") == {
        "[2, 3]": "dim",
        "bf16": "cyan",
        "[-2.1 ▁▂·█ 2.6]": "green",
        "▁▂·█": "blue",
        "NaN 12!": "bold red",
        "-Inf 3!": "bold red",
    }
    assert colours("f32 NaN!") == {"f32": "cyan", "NaN!": "bold red"}
    assert colours("[4] f32 all +Inf 4!")["all +Inf 4!"] == "bold red"
