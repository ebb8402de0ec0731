"""An exact reference: integers for the sums, decimals with 60 digits for the roots."""

from __future__ import annotations

import collections
import decimal
import math
from collections.abc import Callable, Iterable
from fractions import Fraction

import pytest

from tensortap.core.record import Summary

_CONTEXT = decimal.Context(prec=60, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
_SCALE = 1074  # times 2**_SCALE, every float64 is an integer


def _root(x: Fraction, halvings: int) -> float:
    """Return the square root of x, taken `halvings` times."""
    y = _CONTEXT.divide(decimal.Decimal(x.numerator), decimal.Decimal(x.denominator))
    for _ in range(halvings):
        y = _CONTEXT.sqrt(y)
    return float(y)


def _scaled(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * ((1 << _SCALE) // denominator)


def _reference(values: Iterable[float]) -> Summary:
    everything = list(values)
    finite = [v for v in everything if math.isfinite(v)]
    counts = {
        "count": len(everything),
        "zeros": sum(v == 0 for v in finite),
        "nans": sum(math.isnan(v) for v in everything),
        "posinfs": sum(v == math.inf for v in everything),
        "neginfs": sum(v == -math.inf for v in everything),
    }
    names = ["min", "max", "mean", "std", "mean_abs", "max_abs", "min_abs", "rm2", "rm4", "rm8"]
    if not finite:
        return Summary(**counts, **dict.fromkeys(names, math.nan))
    n = len(finite)
    x = [_scaled(v) for v in finite]
    sizes = [abs(v) for v in x]

    def mean_of_powers(power: int) -> Fraction:
        return Fraction(sum(v**power for v in sizes), n << (_SCALE * power))

    deviations = n * sum(v * v for v in x) - sum(x) ** 2  # n times their squares
    bins = collections.Counter(v.bit_length() - 1 - _SCALE for v in sizes if v)
    first = min(bins, default=0)
    return Summary(
        **counts,
        min=float(min(finite)),
        max=float(max(finite)),
        mean=float(Fraction(sum(x), n << _SCALE)),
        std=_root(Fraction(deviations, n * (n - 1) << 2 * _SCALE), 1) if n > 1 else 0.0,
        mean_abs=float(mean_of_powers(1)),
        max_abs=float(Fraction(max(sizes), 1 << _SCALE)),
        min_abs=float(Fraction(min(sizes), 1 << _SCALE)),
        rm2=_root(mean_of_powers(2), 1),
        rm4=_root(mean_of_powers(4), 2),
        rm8=_root(mean_of_powers(8), 3),
        first_bin=first,
        bins=tuple(bins[b] for b in range(first, max(bins) + 1)) if bins else (),
    )


def _assert_close(got: Summary, want: Summary, tolerance: float) -> None:
    for name in ("count", "zeros", "nans", "posinfs", "neginfs", "first_bin", "bins"):
        assert getattr(got, name) == getattr(want, name), name
    for name in ("min", "max", "max_abs", "min_abs"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=0, abs=0, nan_ok=True)
    # 5e-324 is the spacing of float64 near zero: no figure can be more accurate
    steps = 4 * 5e-324
    for name in ("std", "mean_abs", "rm2", "rm4", "rm8"):
        expected = pytest.approx(getattr(want, name), rel=tolerance, abs=steps, nan_ok=True)
        assert getattr(got, name) == expected, name
    allowed = max(tolerance * want.mean_abs, steps) if want.finite else 0.0
    assert got.mean == pytest.approx(want.mean, rel=0, abs=allowed, nan_ok=True)


@pytest.fixture(scope="session")
def reference() -> Callable[[Iterable[float]], Summary]:
    return _reference


@pytest.fixture(scope="session")
def assert_close() -> Callable[[Summary, Summary, float], None]:
    return _assert_close
