"""Putting summaries together: shards to the whole, chunks to a tensor.

`Moments` are the averages behind a summary in units of a power of two, so that their eighth
powers neither overflow nor underflow. They add up by Chan's formula. When there is nothing
finite to average, every figure is nan: there is no such number, and 0.0 would claim one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from tensortap.record import Summary

_NOTHING = -(1 << 20)  # the unit of moments that hold only zeros: below any other's


class Moments(NamedTuple):
    """Averages over `n` finite values, in units of ``2**exponent`` to the power concerned."""

    n: int = 0
    exponent: int = _NOTHING
    mean: float = 0.0
    m2: float = 0.0  # the sum of squared deviations from the mean
    mean_abs: float = 0.0
    p2: float = 0.0  # pK is the mean of |x|^K
    p4: float = 0.0
    p8: float = 0.0


def unit(max_abs: float) -> int:
    """The exponent of the unit in which `max_abs` lies between a half and one.

    >>> unit(6.0)
    3
    """
    return math.frexp(max_abs)[1] if max_abs else _NOTHING


def scale(x: float, exponent: int) -> float:
    """``x * 2**exponent``, infinite where float64 ends.

    >>> scale(0.75, 3), scale(-1.0, 2000)
    (6.0, -inf)
    """
    try:
        return math.ldexp(x, exponent)
    except OverflowError:
        return math.copysign(math.inf, x)


def in_unit(m: Moments, exponent: int) -> Moments:
    """The same moments in another unit."""
    k = m.exponent - exponent
    if k == 0:
        return m
    return Moments(
        m.n,
        exponent,
        scale(m.mean, k),
        scale(m.m2, 2 * k),
        scale(m.mean_abs, k),
        scale(m.p2, 2 * k),
        scale(m.p4, 4 * k),
        scale(m.p8, 8 * k),
    )


def add(a: Moments, b: Moments) -> Moments:
    """The moments of both together.

    >>> add(Moments(1, 0, mean=0.25), Moments(1, 0, mean=0.75)).mean
    0.5
    """
    if not a.n or not b.n:
        return a if a.n else b
    # the larger unit: what the smaller loses to underflow is far below what float64 can tell
    exponent = max(a.exponent, b.exponent)
    a, b = in_unit(a, exponent), in_unit(b, exponent)
    n = a.n + b.n
    rest, part = a.n / n, b.n / n
    delta = b.mean - a.mean
    return Moments(
        n,
        exponent,
        a.mean + delta * part,
        a.m2 + b.m2 + delta * delta * part * a.n,
        a.mean_abs * rest + b.mean_abs * part,
        a.p2 * rest + b.p2 * part,
        a.p4 * rest + b.p4 * part,
        a.p8 * rest + b.p8 * part,
    )


def figures(m: Moments) -> tuple[float, float, float, float, float, float]:
    """``mean, std, mean_abs, rm2, rm4, rm8``; all nan when there is nothing to average."""
    if not m.n:
        return (math.nan,) * 6
    variance = m.m2 / (m.n - 1) if m.n > 1 else 0.0
    roots = (
        math.sqrt(variance),
        m.mean_abs,
        math.sqrt(m.p2),
        math.sqrt(math.sqrt(m.p4)),
        math.sqrt(math.sqrt(math.sqrt(m.p8))),
    )
    std, mean_abs, rm2, rm4, rm8 = (scale(x, m.exponent) for x in roots)
    return scale(m.mean, m.exponent), std, mean_abs, rm2, rm4, rm8


def moments(s: Summary) -> Moments:
    """What a summary says about the averages."""
    n = s.finite
    if not n:
        return Moments()
    exponent = unit(s.max_abs)

    def square(x: float) -> float:
        return x * x

    std, rm2, rm4, rm8 = (scale(x, -exponent) for x in (s.std, s.rm2, s.rm4, s.rm8))
    return Moments(
        n,
        exponent,
        scale(s.mean, -exponent),
        square(std) * (n - 1),
        scale(s.mean_abs, -exponent),
        square(rm2),
        square(square(rm4)),
        square(square(square(rm8))),
    )


def dense(counts: dict[int, int]) -> tuple[int, tuple[int, ...]]:
    """The first bin and the dense list of ``bin → count``.

    >>> dense({-1: 2, 1: 5})
    (-1, (2, 0, 5))
    """
    filled = [b for b, n in counts.items() if n]
    if not filled:
        return 0, ()
    first = min(filled)
    return first, tuple(counts.get(b, 0) for b in range(first, max(filled) + 1))


def _bins(summaries: Iterable[Summary]) -> tuple[int, tuple[int, ...]]:
    counts: dict[int, int] = {}
    for s in summaries:
        for b, n in s.exponents.items():
            counts[b] = counts.get(b, 0) + n
    return dense(counts)


def merge(*summaries: Summary) -> Summary:
    """The summary of all values that the summaries are about, in any order.

    >>> from tensortap.stats import summarize_array
    >>> import numpy as np
    >>> whole = merge(summarize_array(np.array([1.0, 2.0])), summarize_array(np.array([3.0])))
    >>> whole.count, whole.mean, whole.std
    (3, 2.0, 1.0)
    """
    total = Moments()
    for s in summaries:
        total = add(total, moments(s))
    mean, std, mean_abs, rm2, rm4, rm8 = figures(total)
    seen = [s for s in summaries if s.finite]
    first_bin, bins = _bins(summaries)
    return Summary(
        count=sum(s.count for s in summaries),
        zeros=sum(s.zeros for s in summaries),
        nans=sum(s.nans for s in summaries),
        posinfs=sum(s.posinfs for s in summaries),
        neginfs=sum(s.neginfs for s in summaries),
        min=min((s.min for s in seen), default=math.nan),
        max=max((s.max for s in seen), default=math.nan),
        mean=mean,
        std=std,
        mean_abs=mean_abs,
        max_abs=max((s.max_abs for s in seen), default=math.nan),
        min_abs=min((s.min_abs for s in seen), default=math.nan),
        rm2=rm2,
        rm4=rm4,
        rm8=rm8,
        first_bin=first_bin,
        bins=bins,
    )
