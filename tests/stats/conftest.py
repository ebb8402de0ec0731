"""An exact reference: fractions for the sums, decimals with 60 digits for the roots."""

from __future__ import annotations

import collections
import decimal
import math
from collections.abc import Callable, Iterable
from fractions import Fraction

import pytest

from tensortap.record import Summary

_CONTEXT = decimal.Context(prec=60, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)


def _root(x: Fraction, halvings: int) -> float:
    """The square root of x, taken so many times."""
    y = _CONTEXT.divide(decimal.Decimal(x.numerator), decimal.Decimal(x.denominator))
    for _ in range(halvings):
        y = _CONTEXT.sqrt(y)
    return float(y)


def _bin(x: Fraction) -> int:
    size = abs(x)
    n = size.numerator.bit_length() - size.denominator.bit_length()
    return n if size >= Fraction(2) ** n else n - 1


def _reference(values: Iterable[float]) -> Summary:
    everything = list(values)
    x = [Fraction(v) for v in everything if math.isfinite(v)]
    counts = {
        "count": len(everything),
        "zeros": sum(v == 0 for v in x),
        "nans": sum(math.isnan(v) for v in everything),
        "posinfs": sum(v == math.inf for v in everything),
        "neginfs": sum(v == -math.inf for v in everything),
    }
    names = ["min", "max", "mean", "std", "mean_abs", "max_abs", "min_abs", "rm2", "rm4", "rm8"]
    if not x:
        return Summary(**counts, **dict.fromkeys(names, math.nan))
    n = len(x)
    sizes = [abs(v) for v in x]
    mean = sum(x, Fraction()) / n
    squares = sum(((v - mean) ** 2 for v in x), Fraction())
    bins = collections.Counter(_bin(v) for v in x if v)
    first = min(bins, default=0)
    return Summary(
        **counts,
        min=float(min(x)),
        max=float(max(x)),
        mean=float(mean),
        std=_root(squares / (n - 1), 1) if n > 1 else 0.0,
        mean_abs=float(sum(sizes, Fraction()) / n),
        max_abs=float(max(sizes)),
        min_abs=float(min(sizes)),
        rm2=_root(sum((v**2 for v in sizes), Fraction()) / n, 1),
        rm4=_root(sum((v**4 for v in sizes), Fraction()) / n, 2),
        rm8=_root(sum((v**8 for v in sizes), Fraction()) / n, 3),
        first_bin=first,
        bins=tuple(bins[b] for b in range(first, max(bins) + 1)) if bins else (),
    )


def _assert_close(got: Summary, want: Summary, tolerance: float) -> None:
    for name in ("count", "zeros", "nans", "posinfs", "neginfs", "first_bin", "bins"):
        assert getattr(got, name) == getattr(want, name), name
    for name in ("min", "max", "max_abs", "min_abs"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=0, abs=0, nan_ok=True)
    # 5e-324 is the step of float64 near zero: no figure can be closer than that
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
