"""Compare any two values, and describe differences."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tensortap as tap
from tensortap.rooms.compare import compare_values
from tensortap.values.snapshot import borrow
from tests.compare import reference

torch = pytest.importorskip("torch")


def forms(array):
    """The same numbers in every framework."""
    import jax.numpy as jnp

    yield array
    yield borrow(array)
    bits = array.view(f"i{array.dtype.itemsize}")
    if array.dtype.name == "bfloat16":
        yield torch.from_numpy(bits.copy()).view(torch.bfloat16)
    else:
        yield torch.from_numpy(array.copy())
        yield torch.from_numpy(array.T.copy()).T  # another order in memory
        yield torch.nn.Parameter(torch.from_numpy(array.copy()))
    yield jnp.asarray(array)


@pytest.mark.parametrize("first", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("second", ["float32", "bfloat16"])
def test_tensors_of_every_framework_and_dtype_against_each_other(first, second):
    x = np.random.default_rng(0).integers(-100, 100, (3, 4)).astype(np.float32)
    y = x.copy()
    y[1, 2] += 8
    for a in forms(x.astype(reference.dtype_of(first))):
        for b in forms(x.astype(reference.dtype_of(second))):
            found = compare_values(a, b)
            assert found, (a, b, found)
            assert found.dtypes == (first, second)
            assert bool(found.notes) == (first != second)
        for b in forms(y.astype(reference.dtype_of(second))):
            found = compare_values(a, b)
            assert not found
            assert (found.mismatches, found.worst, found.max_abs) == (1, (1, 2), 8.0)
            assert found.values == (float(x[1, 2]), float(y[1, 2]))


FINITE = hnp.arrays(np.float64, 5, elements=st.floats(allow_nan=False, allow_infinity=False))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    a=FINITE,
    b=FINITE,
    atol=st.one_of(st.just(0.0), st.floats(0, 1e308)),
    rtol=st.one_of(st.just(0.0), st.floats(0, 10)),
)
def test_passing_tolerance_is_the_smallest(a, b, atol, rtol):
    with np.errstate(all="ignore"):
        if not np.isfinite(a - b).all():
            return
    found = compare_values(a, b, atol=atol, rtol=rtol)
    if found.passing_atol is not None:
        assert compare_values(a, b, atol=found.passing_atol, rtol=rtol)
        # exact but for the last digits of the larger term that it is added to
        less = found.passing_atol - 1e-14 * max(found.passing_atol, rtol * float(np.abs(b).max()))
        if found.passing_atol > 1e-300 and less > 0:
            assert not compare_values(a, b, atol=less, rtol=rtol)
    if found.passing_rtol is not None:
        assert compare_values(a, b, atol=atol, rtol=found.passing_rtol)
        # subnormal products have few digits, and what atol leaves may be less than one of it
        if atol == 0 and found.passing_rtol and np.abs(b).min() > 1e-280 < np.abs(a - b).max():
            assert not compare_values(a, b, atol=atol, rtol=found.passing_rtol * (1 - 1e-14))


def test_no_passing_tolerance():
    nan = compare_values(np.array([1.0, np.nan]), np.array([1.0, 2.0]))
    assert (nan.passing_atol, nan.passing_rtol, nan.nonfinite, nan.worst) == (None, None, 1, (1,))
    zero = compare_values(np.array([1.0]), np.array([0.0]))
    assert (zero.passing_atol, zero.passing_rtol, zero.max_rel) == (
        pytest.approx(1),
        None,
        math.inf,
    )
    bools = compare_values(np.array([True]), np.array([False]))
    assert (bools.passing_atol, bools.passing_rtol) == (None, None)


def test_nan_and_infinity():
    x = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert compare_values(x, x.astype(np.float32))
    found = compare_values(x, x.copy(), equal_nan=False)
    assert (bool(found), found.mismatches, found.worst) == (False, 1, (0,))
    assert not compare_values(np.inf, -np.inf)
    assert not compare_values(np.inf, 1e308)
    assert not compare_values(1.0, np.inf)  # atol + rtol*inf would allow anything
    assert compare_values(math.nan, np.float16(np.nan))


def test_integers_of_any_size_are_exact():
    big = 2**62
    assert not compare_values(np.array([big]), np.array([big + 1]))
    assert not compare_values(np.array([2**64 - 1], np.uint64), np.array([-1]))
    assert compare_values(np.array([2**63 - 1]), np.array([2**63 - 1], np.uint64))
    found = compare_values(np.array([2**53 + 1]), np.array([2**53], np.uint64))
    assert (found.max_abs, found.values) == (1.0, (2**53 + 1, 2**53))
    assert not compare_values(1_000_000, 1_000_001)
    assert not compare_values(2**70, 2**70 + 1)
    assert compare_values(2**70, 2**70)
    assert compare_values(2**70, float(2**70))
    assert compare_values(True, 1)
    assert not compare_values(True, False, atol=5)
    assert compare_values(torch.tensor([True]), np.array([1]))


def test_integers_have_the_tolerance_that_is_given():
    a, b = torch.tensor([1_000_000, 7]), torch.tensor([1_000_001, 7])
    found = compare_values(a, b)
    assert (bool(found), found.passing_atol) == (False, 1.0)
    assert compare_values(a, b, rtol=1e-5)
    assert compare_values(a, b, atol=1)
    assert not compare_values(a, b, atol=0.5)
    assert not compare_values(a, b, rtol=0)
    assert compare_values(1_000_000, 1_000_001, rtol=found.passing_rtol)
    assert compare_values(np.array([2**62]), np.array([2**62 + 1]), atol=1)
    assert not compare_values(np.array([2**62]), np.array([2**62 + 3]), atol=1)
    assert not compare_values(a > 7, a > 0, atol=5)  # bools are no numbers
    assert compare_values(a.byte(), b.byte(), atol=1)


def test_integers_against_floats_by_their_exact_difference():
    rules = {"atol": 0.0, "rtol": 0.0}
    assert compare_values(np.array([2**53]), np.array([2.0**53]), **rules)
    found = compare_values(np.array([2**53 + 1]), np.array([2.0**53]), **rules)
    assert (bool(found), found.max_abs) == (False, 1.0)
    assert compare_values(3, 3.0000000001)
    assert not compare_values(2**64 + 1, 2.0**64, **rules)
    assert not compare_values(2**70, math.inf)
    assert compare_values(10**400, 10**400)
    assert not compare_values(10**400, 1.0)


def test_float64_is_not_rounded():
    a = np.array([1.0])
    assert not compare_values(a, a + 1e-15, atol=0, rtol=0)
    found = compare_values(np.float32(0.1), 0.1, atol=0, rtol=0)
    assert found.max_abs == abs(float(np.float32(0.1)) - 0.1)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_numbers_by_their_parts(dtype):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(100) + 1j * rng.standard_normal(100) for _ in range(2))
    a, b = a.astype(dtype), b.astype(dtype)
    found = compare_values(a, b)
    parts = [np.stack([each.real, each.imag], -1) for each in (a, b)]
    assert found.max_abs == np.abs(np.subtract(*parts, dtype=np.float64)).max()
    assert found.values == (a[found.worst], b[found.worst])
    assert "real and imaginary parts" in found.reason
    assert compare_values(a, a.copy())
    assert compare_values(np.array([1 + np.nan * 1j]), np.array([1 + np.nan * 1j]))
    assert compare_values(1 + 1j, np.complex64(1 + 1j))
    assert compare_values(np.array([1 + 0j]), np.array([1.0]))
    assert not compare_values(np.array([1 + 1j]), np.array([1.0]))


def test_different_shapes_differ():
    found = compare_values(np.ones((2, 3)), torch.ones(3, 2))
    assert not found
    assert found.shapes == ((2, 3), (3, 2))
    assert "[2, 3] and [3, 2]" in repr(found)
    assert not compare_values(np.ones(1), 1.0)


def test_empty_arrays_agree():
    found = compare_values(np.empty((0, 3)), torch.empty(0, 3))
    assert found
    assert (found.count, found.share) == (0, 0.0)


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Layer:
    weight: object
    name: str = "one"


class Plain:
    def __init__(self, **values):
        self.__dict__.update(values)


class Slots:
    __slots__ = ("inner", "other")

    def __init__(self, inner):
        self.inner = inner


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


SAME = [
    (None, None),
    ("text", "text"),
    (b"ab", bytearray(b"ab")),
    ([1, 2.0, "x"], (1, 2.0, "x")),
    ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
    ({1, "x"}, frozenset({1, "x"})),
    (Point(1, 2.0), Point(1, 2.0)),
    (Layer(torch.ones(2)), Layer(np.ones(2))),
    ([1.0, 2.0], np.array([1.0, 2.0])),
    (Plain(w=np.ones(2)), Plain(w=np.ones(2))),
    (Slots([1]), Slots([1])),
    (pathlib.PurePath("a"), pathlib.PurePath("a")),
    (Colour.RED, Colour.RED),
    (np.array(["a", "b"]), np.array(["a", "b"])),
    (np.array(["2026-01-01", "NaT"], "M8[D]"), np.array(["2026-01-01", "NaT"], "M8[D]")),
    (np.array([1, "x", None], object), np.array([1, "x", None], object)),
    (int, int),
]


@pytest.mark.parametrize(("a", "b"), SAME, ids=lambda x: type(x).__name__)
def test_equal_values(a, b):
    assert compare_values(a, b), compare_values(a, b)
    assert repr(compare_values(a, b)).startswith("<equal")


DIFFERENT = [
    (None, 0, "None and 0"),
    (None, [], "None and a list"),
    ("abcdef", "abcxef", "'abcdef' and 'abcxef'"),
    ("1", 1, "'1' and 1"),
    (b"ab", "ab", "b'ab' and 'ab'"),
    (b"abc", b"abd", "b'abc' and b'abd'"),
    ([1, 2], [1, 2, 3], "lengths 2 and 3"),
    ({"a": 1}, {"a": 1, "b": 2}, "only b has it"),
    ({1, 2}, {2, 3}, "{1, 2} and {2, 3}"),
    ({"a": 1}, [1], "a dict and a list"),
    (np.ones(2), {"a": 1}, "a ndarray and a dict"),
    (np.ones(2), "text", "a ndarray and 'text'"),
    (Point(1, 2), Point(1, 3), ".y"),
    (Layer(1), Layer(1, "two"), ".name"),
    (Plain(w=1.0), Plain(w=2.0), ".w"),
    (Slots([1]), Slots([2]), ".inner[0]"),
    (Colour.RED, Colour.BLUE, "Colour.RED"),
    (np.array(["a", "b"]), np.array(["a", "c"]), "'b' and 'c'"),
    (np.array(["a"]), np.array([1]), "'a' and 1"),
    (np.array(["2026-01-01"], "M8[D]"), np.array([1.0]), ""),
    (int, float, "int"),
    ([[1, 2], [3]], np.array([1, 2]), "a list and a ndarray"),
]


@pytest.mark.parametrize(("a", "b", "said"), DIFFERENT, ids=lambda x: type(x).__name__)
def test_reasons_of_differences(a, b, said):
    for found in (compare_values(a, b), compare_values([a], [b])):
        assert not found
        assert said in repr(found), repr(found)
    assert not compare_values(b, a)


def test_path_of_a_difference():
    a = {"layers": [0, 1, 2, {"w": np.ones(3)}], Point(1, 2): Layer([1.0])}
    b = {"layers": [0, 1, 2, {"w": np.zeros(3)}], Point(1, 2): Layer([2.0])}
    found = compare_values(a, b)
    assert [part.path for part in found.parts] == [
        '["layers"][3]["w"]', "[Point(x=1, y=2)].weight[0]",
    ]  # fmt: skip
    assert (found.leaves, found.differing) == (6, 2)
    assert (found.count, found.mismatches, found.max_abs) == (7, 4, 1.0)
    assert '["layers"][3]["w"]: 3 of 3 elements' in repr(found)


def test_recursive_containers():
    a, b = [1], [1]
    a.append(a)
    b.append(b)
    assert compare_values(a, b)
    b.insert(1, 5)
    assert not compare_values(a, b)


def test_rejects_deeply_nested_containers():
    a = b = 1
    for _ in range(500):
        a, b = [a], [b]
    with pytest.raises(tap.TensortapError, match="deeper than 100"):
        compare_values(a, b)


def test_record_nodes():
    value = {"w": np.arange(5000.0), "n": [1, (2, 3)], "p": Layer(1 + 2j), 5: {1, 2}, "b": b"x"}
    node = borrow(value)
    assert compare_values(node, value)
    assert compare_values(value, node)
    other = dict(value, n=[1, (2, 4)])
    assert compare_values(borrow(other), node).parts[0].path == '["n"][1][1]'
    odd = borrow(object())
    assert not compare_values(odd, value)
    assert compare_values(borrow(ValueError), borrow(ValueError))


def test_user_comparison_may_raise():
    class Odd:
        __hash__ = None

        def __eq__(self, other):
            raise RuntimeError("no")

    found = compare_values(Odd(), Odd())
    assert not found
    assert "RuntimeError" in repr(found)


def test_error_names_a_remedy():
    with pytest.raises(tap.TensortapError, match="to_dense"):
        compare_values(torch.eye(2).to_sparse(), torch.eye(2))


@pytest.mark.parametrize("wrong", [{"atol": -1}, {"rtol": math.nan}, {"atol": math.inf}])
def test_tolerances_are_checked(wrong):
    with pytest.raises(ValueError, match="tol must be a number"):
        compare_values(1, 1, **wrong)
