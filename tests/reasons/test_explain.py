"""Each hypothesis is claimed where it holds, and only there."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tensortap.rooms.reasons.explain import explain

RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 8)).astype(np.float32)
Y = RNG.standard_normal((6, 8)).astype(np.float32)
CUBE = RNG.standard_normal((4, 4, 4, 4)).astype(np.float32)
LARGE = RNG.standard_normal((300, 400)).astype(np.float32)


def kinds(a, b):
    return list(explain(a, b))


# ---- what holds for nothing ----

NOTHING = {
    "random": (X, Y),
    "random, square": (CUBE[0, 0], CUBE[1, 1]),
    "noise": (X * (1 + 1e-3 * Y), X),
    "noise, in bfloat16": (
        (X * (1 + 1e-2 * Y)).astype(ml_dtypes.bfloat16),
        X.astype(ml_dtypes.bfloat16),
    ),
    "equal": (X, X.copy()),
    "close": (X, X * np.float32(1 + 1e-7)),
    "constants": (np.ones((4, 4)), np.full((4, 4), 2.0)),
    "a large constant": (np.ones((100, 100)), np.full((100, 100), 2.0)),
    "zeros": (np.zeros((4, 4)), np.zeros((4, 4))),
    "one number": (np.array([2.0]), np.array([4.0])),
    "two numbers": (np.array([2.0, 4.0]), np.array([1.0, 2.0])),
    "a few bools": (
        np.array([[True, False], [True, False]]),
        np.array([[True, True], [False] * 2]),
    ),
    "one element": (X, np.where(np.arange(48).reshape(6, 8) == 5, 9.0, X)),
    "nan": (np.full((4, 4), np.nan), X[:4, :4]),
    "shapes": (X, X[:5]),
    "ranks": (X, X[None]),
    "text": (np.array(["a", "b"]), np.array(["b", "a"])),
    "no arrays": ("a", None),
    "empty": (np.empty((0, 3)), np.empty((3, 0))),
    "a step": (np.arange(20.0) + 1, np.arange(20.0) * 1.37 - 4),
}


@pytest.mark.parametrize("name", NOTHING)
def test_claims_nothing_for(name):
    a, b = NOTHING[name]
    assert explain(a, b) == ()
    assert explain(b, a) == ()


@pytest.mark.parametrize("seed", range(100))
def test_claims_nothing_for_small_random_arrays(seed):
    """Few elements of few kinds: by chance, many things nearly hold."""
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(2, 4, rng.integers(1, 4)))
    for high in (2, 3, 10):
        a, b = rng.integers(0, high, (2, *shape))
        assert all("zeros" in found for found in explain(a.astype(float), b.astype(float)))
    a, b = rng.standard_normal((2, *shape)).astype(np.float32)
    assert kinds(a, b) == []


# ---- transposed ----


@pytest.mark.parametrize(
    ("x", "axes"),
    [
        (X, (1, 0)),
        (CUBE[0, 0], (1, 0)),
        (CUBE[0], (2, 0, 1)),
        (CUBE, (0, 2, 1, 3)),
        (CUBE, (3, 1, 0, 2)),
        (LARGE, (1, 0)),
        (LARGE.reshape(10, 30, 400), (1, 2, 0)),
    ],
)
def test_transposed(x, axes):
    (found,) = explain(x.transpose(axes), x)
    assert found == f"a is b with its axes in the order {axes}"
    (again,) = explain(np.ascontiguousarray(x.transpose(axes)), x.astype(np.float64))
    assert again == found


def test_not_transposed():
    assert kinds(X.reshape(8, 6), X) == []  # the shape of it, in the old order
    turned = X.T.copy()
    turned[3, 3] += 1
    assert kinds(turned, X) == []
    symmetric = X[:, :6] + X[:, :6].T
    assert kinds(symmetric, symmetric + Y[:, :6]) == []
    large = LARGE.T.copy()
    large[399, 299] += 1  # where no sample is taken
    assert kinds(large, LARGE) == []
    assert kinds(X[None].transpose(1, 0, 2), X[None]) == []  # an axis of one moved: nothing moved


# ---- a factor, a sign ----


@pytest.mark.parametrize(
    ("factor", "said"),
    [(8, "8 times"), (1 / 8, "1/8 times"), (-2, "-2 times"), (1 / 3, "1/3 times"),
     (64**-0.5 / 2**0.5, "1/√128"), (0.7123, "0.7123 times")],
)  # fmt: skip
def test_factor(factor, said):
    for x in (X, LARGE, X.astype(np.float64)):
        (found,) = explain(x * x.dtype.type(factor), x)
        assert " times b" in found
        assert said in str(found)
    half = X.astype(ml_dtypes.bfloat16)
    (found,) = explain((half.astype(np.float32) * factor).astype(ml_dtypes.bfloat16), half)
    assert " times b" in found


def test_not_a_factor():
    a = X * np.float32(8)
    a[2, 2] *= np.float32(1.01)
    assert kinds(a, X) == []
    large = LARGE * np.float32(2)
    large[299, 399] += 1
    assert kinds(large, LARGE) == []
    assert kinds(X * 2 + np.float32(0.1), X) == []
    sparse = np.zeros((6, 8))
    sparse[0, 0] = 1.0
    assert kinds(2 * sparse, sparse) == []  # one element tells no factor


def test_sign():
    (found,) = explain(-X, X)
    assert found == "a is b with its sign flipped"
    assert kinds(np.abs(X), X) == []
    assert kinds(-np.ones((4, 4)), np.ones((4, 4))) == []
    mixed = -X
    mixed[0, 0] = X[0, 0]
    assert kinds(mixed, X) == []


def test_constant():
    for x in (X, LARGE, X.astype(np.float64)):
        (found,) = explain(x + x.dtype.type(0.25), x)
        assert found == "a is b plus 0.25"
    shifted = X + np.float32(0.25)
    shifted[2, 2] += 0.1
    assert kinds(shifted, X) == []
    assert kinds(X + np.float32(0.25) * np.sign(Y), X) == []


# ---- rounding ----


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("stored", ["own", "float32"])
def test_rounded(name, stored):
    for x in (X, LARGE):
        coarse = x.astype(getattr(ml_dtypes, name, name))
        if stored == "float32":
            coarse = coarse.astype(np.float32)
        (found,) = explain(coarse, x)
        assert str(found).startswith("a is b rounded to ")
        assert name in str(found)
        (found,) = explain(x, coarse)
        assert str(found).startswith("b is a rounded to ")


def test_rounded_to_float32():
    x = RNG.standard_normal(100)
    (found,) = explain(x, x.astype(np.float32), rtol=0, atol=0)
    assert str(found) == "b is a rounded to float32"


def test_not_rounded():
    half = X.astype(ml_dtypes.bfloat16)
    bits = half.view(np.int16).copy()
    bits[2, 2] += 1
    assert kinds(bits.view(ml_dtypes.bfloat16), X) == []
    cut = (X.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # cut off, not rounded
    assert kinds(cut, X) == []
    assert kinds(Y.astype(ml_dtypes.bfloat16), X) == []
    assert kinds(np.float32([1.0, 2.0]), np.float32([1.001, 2.001])) == []
    ones = np.ones(50, np.float32)
    assert kinds(ones, ones + np.float32(1e-3)) == []  # all the same: they may be meant so
    large = LARGE.astype(np.float16).astype(np.float32)
    large[299, 399] += 1
    assert kinds(large, LARGE) == []


# ---- zeros ----


def test_all_zeros():
    assert [str(f) for f in explain(np.zeros_like(X), X)] == ["a is all zeros"]
    assert [str(f) for f in explain(X, np.zeros_like(X))] == ["b is all zeros"]
    assert [str(f) for f in explain(LARGE, np.zeros_like(LARGE))] == ["b is all zeros"]
