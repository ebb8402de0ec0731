"""Merging of summaries: chunks into a tensor, shards into the whole.

`Moments` are the averages behind a summary, in units of a power of two, so that their eighth
powers neither overflow nor underflow. They are merged by Chan's formula. If there is no finite
value, every figure is nan, because 0.0 would claim a value that does not exist.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tensortap.core.record import Summary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_ZEROS = -(1 << 20)  # the unit of moments that hold only zeros: below all others


class Moments(NamedTuple):
    """Averages over `n` finite values, in units of ``2**exponent`` to the respective power.

    `low`, `high` and `min_abs` are the extremes, in units of 1.
    """

    n: int = 0
    exponent: int = _ZEROS
    mean: float = 0.0
    m2: float = 0.0  # the sum of squared deviations from the mean
    mean_abs: float = 0.0
    p2: float = 0.0  # pK is the mean of |x|^K
    p4: float = 0.0
    p8: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    min_abs: float = math.inf


def unit(max_abs: float) -> int:
    """Return the exponent of the unit in which `max_abs` is between a half and one.

    >>> unit(6.0)
    3
    """
    return math.frexp(max_abs)[1] if max_abs else _ZEROS


def scale(x: float, exponent: int) -> float:
    """Return ``x * 2**exponent``, or an infinity if float64 overflows.

    >>> scale(0.75, 3), scale(-1.0, 2000)
    (6.0, -inf)
    """
    try:
        return math.ldexp(x, exponent)
    except OverflowError:
        return math.copysign(math.inf, x)


def in_unit(m: Moments, exponent: int) -> Moments:
    """Return the same moments in another unit."""
    k = m.exponent - exponent
    if k == 0:
        return m
    return m._replace(
        exponent=exponent,
        mean=scale(m.mean, k),
        m2=scale(m.m2, 2 * k),
        mean_abs=scale(m.mean_abs, k),
        p2=scale(m.p2, 2 * k),
        p4=scale(m.p4, 4 * k),
        p8=scale(m.p8, 8 * k),
    )


def add(a: Moments, b: Moments) -> Moments:
    """Return the moments of the values of both.

    >>> add(Moments(1, 0, mean=0.25), Moments(1, 0, mean=0.75)).mean
    0.5
    """
    if not a.n or not b.n:
        return a if a.n else b
    # the larger unit: what the smaller one loses to underflow is far below the precision
    exponent = max(a.exponent, b.exponent)
    a, b = in_unit(a, exponent), in_unit(b, exponent)
    n = a.n + b.n
    share_a, share_b = a.n / n, b.n / n
    delta = b.mean - a.mean
    return Moments(
        n,
        exponent,
        a.mean + delta * share_b,
        a.m2 + b.m2 + delta * delta * share_b * a.n,
        a.mean_abs * share_a + b.mean_abs * share_b,
        a.p2 * share_a + b.p2 * share_b,
        a.p4 * share_a + b.p4 * share_b,
        a.p8 * share_a + b.p8 * share_b,
        min(a.low, b.low),
        max(a.high, b.high),
        min(a.min_abs, b.min_abs),
    )


def summary_of(
    m: Moments, counts: tuple[int, int, int, int, int], exponents: Mapping[int, int]
) -> Summary:
    """Return a summary; `counts` are the first fields of one, `exponents` count the values.

    >>> summary_of(Moments(), (2, 0, 2, 0, 0), {}).nans
    2
    """
    filled = [exponent for exponent, n in exponents.items() if n]
    first_bin = min(filled, default=0)
    bins = tuple(exponents.get(e, 0) for e in range(first_bin, max(filled, default=-1) + 1))
    if not m.n:
        figures = (math.nan,) * 10
    else:
        variance = m.m2 / (m.n - 1) if m.n > 1 else 0.0
        std, rm2, rm4, rm8 = (
            scale(x, m.exponent)
            for x in (
                math.sqrt(variance),
                math.sqrt(m.p2),
                math.sqrt(math.sqrt(m.p4)),
                math.sqrt(math.sqrt(math.sqrt(m.p8))),
            )
        )
        low, high, min_abs = m.low + 0.0, m.high + 0.0, m.min_abs + 0.0  # -0.0 becomes 0.0
        mean, mean_abs = scale(m.mean, m.exponent), scale(m.mean_abs, m.exponent)
        figures = low, high, mean, std, mean_abs, max(-low, high) + 0.0, min_abs, rm2, rm4, rm8
    return Summary(*counts, *figures, first_bin, bins)


def _moments(s: Summary) -> Moments:
    n = s.finite
    if not n:
        return Moments()
    exponent = unit(s.max_abs)
    std, rm2, rm4, rm8 = (scale(x, -exponent) for x in (s.std, s.rm2, s.rm4, s.rm8))
    p2, r4, r8 = rm2 * rm2, rm4 * rm4, rm8 * rm8
    return Moments(
        n,
        exponent,
        scale(s.mean, -exponent),
        std * std * (n - 1),
        scale(s.mean_abs, -exponent),
        p2,
        r4 * r4,
        (r8 * r8) * (r8 * r8),
        s.min,
        s.max,
        s.min_abs,
    )


def merge(*summaries: Summary) -> Summary:
    """Return the summary of all values that the summaries describe.

    >>> from tensortap.stats import summarize_array
    >>> import numpy as np
    >>> whole = merge(summarize_array(np.array([1.0, 2.0])), summarize_array(np.array([3.0])))
    >>> whole.count, whole.mean, whole.std
    (3, 2.0, 1.0)
    """
    exponents: dict[int, int] = {}
    for s in summaries:
        for exponent, n in s.exponents.items():
            exponents[exponent] = exponents.get(exponent, 0) + n
    moments = functools.reduce(add, map(_moments, summaries), Moments())
    count, zeros, nans, posinfs, neginfs = (
        sum(getattr(s, name) for s in summaries) for name in Summary.__struct_fields__[:5]
    )
    return summary_of(moments, (count, zeros, nans, posinfs, neginfs), exponents)


_COUNTED = Summary.__struct_fields__[:5]
_FINITE = ("count", "nans", "posinfs", "neginfs", "max_abs")
_EXTREMES = {"min": np.fmin, "max": np.fmax, "max_abs": np.fmax, "min_abs": np.fmin}
_POWERS = {"rm2": 2, "rm4": 4, "rm8": 8}


def merged_from(statistic: str) -> tuple[str, ...]:
    """Return the statistics of parts from which one of the whole is computed.

    >>> merged_from("max"), merged_from("std")[5:]
    (('max',), ('mean', 'std'))
    """
    if statistic in _COUNTED or statistic in _EXTREMES:
        return (statistic,)
    return (*_FINITE, "mean", "std") if statistic == "std" else (*_FINITE, statistic)


def merge_column(
    statistic: str, columns: Mapping[str, Floats], starts: NDArray[np.int64]
) -> Floats:
    """Return one statistic of groups of summaries, as `merge` does, for many groups at once.

    `columns` are the statistics of all summaries that `merged_from` names, group by group;
    `starts` are the rows at which the groups begin.

    >>> parts = {"count": [2, 1], "nans": [0, 0], "posinfs": [0, 0], "neginfs": [0, 0]}
    >>> parts |= {"max_abs": [2, 3], "mean": [1.5, 3], "std": [0.5**0.5, 0]}
    >>> columns = {name: np.array(values, float) for name, values in parts.items()}
    >>> merge_column("mean", columns, np.array([0])), merge_column("std", columns, np.array([0]))
    (array([2.]), array([1.]))
    """
    if statistic in _COUNTED:
        return np.asarray(np.add.reduceat(columns[statistic], starts))
    if statistic in _EXTREMES:
        return np.asarray(_EXTREMES[statistic].reduceat(columns[statistic], starts))
    lengths = np.diff(np.append(starts, len(columns["count"])))
    n = columns["count"] - columns["nans"] - columns["posinfs"] - columns["neginfs"]
    total = np.add.reduceat(n, starts)
    # in units of the largest value of the group, so that no power overflows
    largest = np.fmax.reduceat(columns["max_abs"], starts)
    unit_of_group = np.frexp(np.nan_to_num(largest))[1]
    down = -np.repeat(unit_of_group, lengths)
    share = n / np.repeat(np.maximum(total, 1), lengths)

    def figures(name: str) -> Floats:
        return np.asarray(np.ldexp(np.where(n > 0, columns[name], 0.0), down))

    if statistic == "std":
        mean = figures("mean")
        away = mean - np.repeat(np.add.reduceat(mean * share, starts), lengths)
        squares = figures("std") ** 2 * np.maximum(n - 1, 0) + n * away**2
        whole = np.sqrt(np.add.reduceat(squares, starts) / np.maximum(total - 1, 1))
    else:
        power = _POWERS.get(statistic, 1)
        whole = np.add.reduceat(figures(statistic) ** power * share, starts) ** (1 / power)
    return np.where(total > 0, np.ldexp(whole, unit_of_group), np.nan)
