"""What a format would lose, compared with what a cast loses."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from tensortap.core.errors import NotFound
from tensortap.rooms.formats.losses import best_shifts, limits, losses, shares
from tensortap.stats import summarize_array
from tensortap.table.columns import Exponents

FORMATS = (
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float6_e2m3fn float6_e3m2fn float4_e2m1fn float16 bfloat16 float32"
).split()
SATURATING = ("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")  # no infinity, no nan


def exponents(array) -> Exponents:
    s = summarize_array(array)
    counts = np.array(s.bins or (0,), np.int64)[:, None]
    return Exponents(s.first_bin, counts, np.array([s.min_abs]), np.array([s.max_abs]))


def what_if(array, dtype: str) -> SimpleNamespace:
    columns = shares(exponents(array), limits(dtype))
    return SimpleNamespace(**{name: column[0].item() for name, column in columns.items()})


def cast_losses(array, dtype: str) -> tuple[int, int, int]:
    """Return how many values become zero, are below the normal numbers, become too large."""
    values = array[np.isfinite(array) & (array != 0)]
    with np.errstate(over="ignore"):
        if dtype not in ("float16", "float32"):
            # ml_dtypes rounds a float64 to float32 first; rounding twice is not to nearest
            assert (values.astype(np.float32) == values).all()
            values = values.astype(np.float32)
        cast = values.astype(np.dtype(dtype)).astype(np.float64)
    values = values.astype(np.float64)
    info = ml_dtypes.finfo(dtype)
    zero = cast == 0
    small = (np.abs(values) < float(info.smallest_normal)) & ~zero
    if dtype in SATURATING:
        step = 2.0 ** (np.floor(np.log2(float(info.max))) - info.nmant)
        over = np.abs(values) >= float(info.max) + step / 2
    else:
        over = ~np.isfinite(cast)
    return int(zero.sum()), int(small.sum()), int(over.sum())


def check(array, dtype: str, shift: int = 0) -> None:
    found = losses(exponents(array), limits(dtype), shift)
    zero, small, over = cast_losses(np.ldexp(array, shift), dtype)
    assert found.underflow[0] <= zero <= found.underflow_at_most[0]
    assert found.overflow[0] <= over <= found.overflow_at_most[0]
    # the count below the normal numbers is exact
    assert found.underflow[0] + found.subnormal[0] == zero + small


def spread(rng, count: int) -> np.ndarray:
    """Return magnitudes beyond the range of all small formats."""
    center, width = rng.uniform(-40, 40), rng.uniform(0, 12)
    sizes = 2.0 ** rng.normal(center, width, count).clip(-100, 100)
    return (rng.choice([-1, 1], count) * sizes).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("seed", range(3))
def test_counts_agree_with_casts(dtype, seed):
    rng = np.random.default_rng(seed)
    array = spread(rng, 500)
    array[:10] = 0
    array[10:13] = [np.nan, np.inf, -np.inf]
    check(array, dtype)
    check(array[13:], dtype, int(rng.integers(-20, 20)))


@pytest.mark.parametrize("dtype", FORMATS)
def test_values_at_every_limit(dtype):
    at = limits(dtype)
    marks = [2.0**at.zero, 2.0 ** (at.zero + 1), 2.0**at.normal, at.over, 2.0**at.top,
             float(ml_dtypes.finfo(dtype).max), 2.0 ** (at.top + 1)]  # fmt: skip
    near = np.float64 if dtype == "float32" else np.float32
    for mark in marks:
        if mark > float(np.finfo(near).max):
            continue
        steps = (np.nextafter(near(mark), near(0)), mark, np.nextafter(near(mark), near(np.inf)))
        for value in map(float, steps):
            check(np.array([value]), dtype)
            check(np.array([value, 1.0, 0.0]), dtype)
            found = losses(exponents(np.array([value, -value])), limits(dtype))
            # with one value there is no uncertainty
            assert found.underflow[0] == found.underflow_at_most[0]
            assert found.overflow[0] == found.overflow_at_most[0]


def test_format_with_exponents_only():
    array = np.array([2.0**-140, 2.0**-127, 1.0, 2.0**127, 1.4 * 2.0**127, 1.5 * 2.0**127, 1e39])
    found = losses(exponents(array), limits("float8_e8m0fnu"))
    assert (found.underflow[0], found.overflow[0]) == (1, 1)
    assert found.overflow_at_most[0] == 4
    with np.errstate(over="ignore"):
        cast = array.astype(ml_dtypes.float8_e8m0fnu).astype(float)
    assert np.isnan(cast).sum() == 2


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "float4_e2m1fn"])
@pytest.mark.parametrize("seed", range(2))
def test_best_shift_loses_least(dtype, seed):
    rng = np.random.default_rng(seed)
    array = rng.standard_normal(2000) * 2.0 ** rng.uniform(-30, 30) * np.exp(rng.normal(0, 2, 2000))
    array = array.astype(np.float32).astype(np.float64)
    tensors, target = exponents(array), limits(dtype)
    (shift,) = best_shifts(tensors, target).tolist()

    def cost(j: int) -> tuple[int, int, int]:
        found = losses(tensors, target, j)
        lost = int(found.underflow[0] + found.overflow_at_most[0])
        return lost, int(found.subnormal[0]), abs(j)

    assert cost(shift) == min(cost(j) for j in range(-120, 121))
    # the cast of the scaled values loses no more than predicted
    zero, _, over = cast_losses(np.ldexp(array, shift), dtype)
    predicted = what_if(array, dtype)
    assert predicted.shift == shift
    assert (zero + over) / len(array) <= predicted.scaled
    plain_zero, _, plain_over = cast_losses(array, dtype)
    assert zero + over <= plain_zero + plain_over


def test_tensors_that_fit_are_not_shifted():
    found = what_if(np.array([0.5, 1.0, 2.0]), "float16")
    assert found == SimpleNamespace(**{**dict.fromkeys(vars(found), 0), "values": 3})


def test_exact_maximum_decides():
    fits, too_large = np.array([1.0, 448.0, 260.0]), np.array([1.0, 500.0, 260.0])
    assert what_if(fits, "float8_e4m3fn").overflow_at_most == 0
    found = what_if(too_large, "float8_e4m3fn")
    assert found.overflow == pytest.approx(1 / 3)
    assert found.overflow_at_most == pytest.approx(2 / 3)
    assert found.shift == -1


def test_shares_of_empty_tensors_are_nan():
    for empty in (np.zeros(3), np.array([np.nan, np.inf]), np.array([])):
        found = what_if(empty, "float16")
        assert found.values == 0
        assert np.isnan(found.underflow)
        assert found.shift == 0


def test_many_tensors_at_once_equal_each_alone():
    rng = np.random.default_rng(0)
    arrays = [spread(rng, 100) for _ in range(20)]
    alone = [exponents(a) for a in arrays]
    low = min(e.low for e in alone)
    high = max(e.low + len(e.counts) for e in alone)
    counts = np.zeros((high - low, len(arrays)), np.int64)
    for i, e in enumerate(alone):
        counts[e.low - low : e.low - low + len(e.counts), i] = e.counts[:, 0]
    extremes = [np.concatenate([getattr(e, x) for e in alone]) for x in ("min_abs", "max_abs")]
    together = Exponents(low, counts, *extremes)
    target = limits("float8_e5m2")
    shifts = best_shifts(together, target)
    assert shifts.tolist() == [best_shifts(e, target)[0] for e in alone]
    found = losses(together, target, shifts)
    for i, e in enumerate(alone):
        expected = losses(e, target, int(shifts[i]))
        assert [c[i] for c in found] == [c[0] for c in expected]


def test_rejects_unknown_formats():
    with pytest.raises(
        NotFound, match="no float format is called 'int8'; there are float16, float32"
    ):
        limits("int8")
