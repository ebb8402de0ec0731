"""Merging of summaries: chunks into a tensor, shards into the whole.

If there is no finite value, every figure is nan, because 0.0 would claim a value that does not
exist.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.core.record import Summary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


class Moments(NamedTuple):
    """Averages over `n` finite values, in units of ``2**exponent`` to the respective power.

    In a unit near the largest value, no eighth power overflows or underflows. `low`, `high` and
    `min_abs` are the extremes, in units of 1.
    """

    n: int
    exponent: int
    mean: float
    m2: float  # the sum of squared deviations from the mean
    mean_abs: float
    p2: float  # pK is the mean of |x|^K
    p4: float
    p8: float
    low: float
    high: float
    min_abs: float


def scale(x: float, exponent: int) -> float:
    """Return ``x * 2**exponent``, or an infinity if float64 overflows."""
    try:
        return math.ldexp(x, exponent)
    except OverflowError:
        return math.copysign(math.inf, x)


def summary_of(m: Moments, counts: Sequence[int], exponents: Mapping[int, int]) -> Summary:
    """Return a summary; `counts` are the first fields of one, `exponents` count the values."""
    if not m.n:
        return _summary(counts, [math.nan] * 10, exponents)
    variance = m.m2 / (m.n - 1) if m.n > 1 else 0.0
    mean, std, mean_abs, rm2, rm4, rm8 = (
        scale(x, m.exponent)
        for x in (
            m.mean,
            math.sqrt(variance),
            m.mean_abs,
            math.sqrt(m.p2),
            math.sqrt(math.sqrt(m.p4)),
            math.sqrt(math.sqrt(math.sqrt(m.p8))),
        )
    )
    low, high, min_abs = m.low + 0.0, m.high + 0.0, m.min_abs + 0.0  # -0.0 becomes 0.0
    figures = low, high, mean, std, mean_abs, max(-low, high) + 0.0, min_abs, rm2, rm4, rm8
    return _summary(counts, figures, exponents)


def _summary(
    counts: Sequence[int], figures: Sequence[float], exponents: Mapping[int, int]
) -> Summary:
    first, last = min(exponents, default=0), max(exponents, default=-1)
    bins = tuple(exponents.get(exponent, 0) for exponent in range(first, last + 1))
    fields: list[Any] = [*counts, *figures, first, bins]
    return Summary(*fields)


def merge(*summaries: Summary) -> Summary:
    """Return the summary of all values that the summaries describe, at least one of them.

    >>> from tensortap.stats import summarize_array
    >>> import numpy as np
    >>> whole = merge(summarize_array(np.array([1.0, 2.0])), summarize_array(np.array([3.0])))
    >>> whole.count, whole.mean, whole.std
    (3, 2.0, 1.0)
    """
    if len(summaries) == 1:
        return summaries[0]
    names = Summary.__struct_fields__[:15]
    columns = {
        name: np.array([getattr(each, name) for each in summaries], np.float64) for name in names
    }
    figures = [merge_column(name, columns, np.array([0])).item() for name in names[5:]]
    counts = [sum(getattr(each, name) for each in summaries) for name in names[:5]]
    exponents: collections.Counter[int] = collections.Counter()
    for each in summaries:
        exponents.update(each.exponents)
    return _summary(counts, figures, exponents)


_COUNTED = Summary.__struct_fields__[:5]
_FINITE = ("count", "nans", "posinfs", "neginfs", "max_abs")
_EXTREMES = {"min": np.fmin, "max": np.fmax, "max_abs": np.fmax, "min_abs": np.fmin}
_POWERS = {"rm2": 2, "rm4": 4, "rm8": 8}


def merged_from(statistic: str) -> tuple[str, ...]:
    """Return the statistics of parts from which one of the whole is computed."""
    if statistic in _COUNTED or statistic in _EXTREMES:
        return (statistic,)
    return (*_FINITE, "mean", "std") if statistic == "std" else (*_FINITE, statistic)


def merge_column(
    statistic: str, columns: Mapping[str, Floats], starts: NDArray[np.int64]
) -> Floats:
    """Return one statistic of groups of summaries, as `merge` does, for many groups at once.

    `columns` are the statistics of all summaries that `merged_from` names, group by group;
    `starts` are the rows at which the groups begin.
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

    if statistic in ("mean", "std"):
        # relative to one of the means, so that equal means stay exact
        some = np.ldexp(np.nan_to_num(np.fmin.reduceat(columns["mean"], starts)), -unit_of_group)
        away = np.where(n > 0, figures("mean") - np.repeat(some, lengths), 0.0)
        rest = np.add.reduceat(away * share, starts)
    if statistic == "mean":
        whole = some + rest
    elif statistic == "std":
        away = away - np.repeat(rest, lengths)
        squares = figures("std") ** 2 * np.maximum(n - 1, 0) + n * away**2
        whole = np.sqrt(np.add.reduceat(squares, starts) / np.maximum(total - 1, 1))
    else:
        power = _POWERS.get(statistic, 1)
        whole = np.add.reduceat(figures(statistic) ** power * share, starts) ** (1 / power)
    return np.where(total > 0, np.ldexp(whole, unit_of_group), np.nan)
