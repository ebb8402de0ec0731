"""Estimates of what a tensor loses in another number format, from its exponent counts.

The exponent of a value decides almost always whether it becomes zero, subnormal, or too large.
The exception is the bin in which a limit of the format lies. There the exact minimum and maximum
help; if they do not decide it, there are two figures: what is certain, and the maximum.
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.dtypes import DTYPES
from tensortap.core.errors import NotFound
from tensortap.rooms.logframe.frame import layer_names, rows_with_statistics, tensor_types
from tensortap.table.columns import Exponents, exponents
from tensortap.table.kinds import need_pandas

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from tensortap.table.table import Table

    Integers = NDArray[np.int64]


Counts = NDArray[np.int64]
Reals = NDArray[np.float64]


class Limits(NamedTuple):
    """The limits of a format, for values that are rounded to nearest."""

    dtype: str
    zero: int  # 2**zero is half of the smallest number: below it, values become zero
    half_is_lost: bool  # whether exactly 2**zero becomes zero, too
    normal: int  # below 2**normal, numbers have fewer digits
    top: int  # the exponent of the largest number
    over: float  # above it, values are too large
    over_is_lost: bool  # whether exactly this value is too large, too


@functools.lru_cache(64)
def limits(dtype: str) -> Limits:
    """Return the limits of a float format.

    >>> limits("float8_e4m3fn")
    Limits(dtype='float8_e4m3fn', zero=-10, half_is_lost=True, normal=-6, top=8, over=464.0,
           over_is_lost=False)
    """
    row = DTYPES.get(dtype)
    if row is None or row.format is None:
        known = [name for name, other in DTYPES.items() if other.kind == "float"]
        meant = re.sub(r"^fp", "float", dtype.lower())  # "fp8" is one of several
        known.sort(key=lambda name: not name.startswith(meant))
        raise NotFound(f"no float format is called {dtype!r}; there are {', '.join(known)}")
    digits, normal, largest = row.format
    smallest, exponent = row.exponents
    step = math.ldexp(1.0, exponent - (digits - 1))
    # `over` is halfway between the largest number and the next one, if there were one. A tie
    # rounds to even; a format that has only exponents rounds it up.
    odd = int(largest / step) % 2 == 1
    return Limits(
        dtype,
        zero=smallest - 1,
        half_is_lost=digits > 1,
        normal=normal,
        top=exponent,
        over=largest + step / 2,
        over_is_lost=odd or digits == 1,
    )


def has_limits(dtype: str) -> bool:
    """Return whether a dtype is a float format.

    >>> has_limits("float16"), has_limits("int8")
    (True, False)
    """
    row = DTYPES.get(dtype)
    return row is not None and row.format is not None


class Loss(NamedTuple):
    """Counts of nonzero finite values and of lost ones; one element per tensor."""

    values: Counts
    underflow: Counts
    underflow_at_most: Counts
    subnormal: Counts
    overflow: Counts
    overflow_at_most: Counts


class _CumulativeCounts:
    """The number of values below each power of two."""

    def __init__(self, tensors: Exponents) -> None:
        self.low, counts, self.min_abs, self.max_abs = tensors
        self._below = np.zeros((len(counts) + 1, counts.shape[1]), np.int64)
        np.cumsum(counts, axis=0, out=self._below[1:])
        self.values: Counts = self._below[-1]
        filled = np.flatnonzero(counts.any(axis=1))
        self.first = self.low + int(filled[0]) if len(filled) else 0
        self.last = self.low + int(filled[-1]) if len(filled) else 0

    def below(self, exponent: int) -> Counts:
        index = min(max(exponent - self.low, 0), len(self._below) - 1)
        counts: Counts = self._below[index]
        return counts

    def losses(self, target: Limits, shift: int) -> Loss:
        zero, top = target.zero - shift, target.top - shift
        under = under_at_most = self.below(zero)
        if target.half_is_lost and zero >= -1074:
            half = math.ldexp(1.0, zero)
            in_bin = self.below(zero + 1)
            under = np.where(self.max_abs == half, in_bin, under + (self.min_abs == half))
            under_at_most = np.where(self.min_abs > half, under, in_bin)
        over = self.values - self.below(top + 1)
        over_at_most = self.values - self.below(top)
        try:
            limit = math.ldexp(target.over, -shift)
        except OverflowError:
            limit = math.inf
        is_over = np.greater_equal if target.over_is_lost else np.greater
        some, every = is_over(self.max_abs, limit), is_over(self.min_abs, limit)
        # if the maximum is too large and lies in the undecided bin, at least one value is lost
        over = np.where(every, over_at_most, over + (some & (over == 0)))
        over_at_most = np.where(some, over_at_most, over)
        subnormal = np.maximum(self.below(target.normal - shift) - under, 0)
        return Loss(self.values, under, under_at_most, subnormal, over, over_at_most)


def losses(tensors: Exponents, target: Limits, shift: int | Counts = 0) -> Loss:
    """Return what tensors lose in a format after multiplication by ``2**shift``.

    `shift` is one number, or an array with one for each tensor.
    """
    below = _CumulativeCounts(tensors)
    if isinstance(shift, int):
        return below.losses(target, shift)
    columns = [np.zeros_like(below.values) for _ in Loss._fields]
    for each in np.unique(shift).tolist():
        chosen = shift == each
        for column, counts in zip(columns, below.losses(target, each), strict=True):
            column[chosen] = counts[chosen]
    return Loss(*columns)


def best_shifts(tensors: Exponents, target: Limits) -> Counts:
    """Return for each tensor the shift that loses least.

    The loss is certain underflow plus possible overflow. Among equal losses, fewer subnormal
    numbers are better, then a smaller shift.
    """
    below = _CumulativeCounts(tensors)
    lowest = min(0, target.top - below.last - 1)
    highest = max(0, target.normal - below.first + 1)
    count = tensors.counts.shape[1]
    best = np.zeros(count, np.int64)
    least = np.full(count, np.iinfo(np.int64).max)
    fewest = least.copy()
    for shift in sorted(range(lowest, highest + 1), key=lambda j: (abs(j), j)):
        loss = below.losses(target, shift)
        lost = loss.underflow + loss.overflow_at_most
        better = (lost < least) | ((lost == least) & (loss.subnormal < fewest))
        best[better] = shift
        least[better] = lost[better]
        fewest[better] = loss.subnormal[better]
    return best


def shares(tensors: Exponents, target: Limits) -> dict[str, Any]:
    """Return losses as shares of the nonzero finite values: one column per figure.

    `scaled` is the share that is lost, at most, after multiplication by ``2**shift``.
    """
    plain = losses(tensors, target)
    shift = best_shifts(tensors, target)
    scaled = losses(tensors, target, shift)
    with np.errstate(invalid="ignore"):  # without values, a share is nan
        columns: dict[str, Any] = {
            name: column if name == "values" else column / plain.values
            for name, column in plain._asdict().items()
        }
        columns["shift"] = shift
        columns["scaled"] = (scaled.underflow_at_most + scaled.overflow_at_most) / plain.values
    return columns


# -- the frame of `run.formats` -----------------------------------------------------------------


def formats_of(table: Table, dtype: str, *, step: int | str | None = None) -> pd.DataFrame:
    """Return one row per tensor and step: the shares lost of nonzero values, and the best scale.

    Without `step`, these are the latest steps of each tensor.
    """
    pd = need_pandas("run.formats()")
    import pyarrow as pa

    target = limits(dtype)
    rows, cells = rows_with_statistics(table, ["tags"])
    columns = {
        "name": layer_names(table, rows, cells),
        "tensor_type": tensor_types(table, rows, cells),
        "step": table.step[rows],
    }
    keys = pa.table(columns).to_pandas()
    steps, wanted = keys["step"], step
    if step is None:
        wanted = keys.groupby(["name", "tensor_type"])["step"].transform("max")
    chosen = np.flatnonzero((steps == wanted) | (step == "all"))
    if len(steps) and not len(chosen):
        raise NotFound(f"nothing at step {step}; steps go from {steps.min()} to {steps.max()}")
    keys, rows = keys.iloc[chosen].reset_index(drop=True), rows[chosen]
    groups = keys.groupby(["name", "tensor_type", "step"], sort=False)
    tensors = groups.size().reset_index().drop(columns=0)
    group = groups.ngroup().to_numpy()
    order = np.argsort(group, kind="stable")
    starts = range(0, len(tensors), 1 << 16)
    parts = []
    for part in np.split(order, np.searchsorted(group[order], starts)[1:]):  # whole groups
        lost = shares(_grouped_exponents(table, rows[part], group[part]), target)
        parts.append(pd.DataFrame(lost))
    frame = pd.concat([tensors, pd.concat(parts, ignore_index=True)], axis=1)
    frame.insert(list(frame.columns).index("scaled"), "scale", np.exp2(frame["shift"]))
    return frame


def _grouped_exponents(table: Table, rows: Integers, group: Integers) -> Exponents:
    """Return the exponents of groups of rows; the rows of a group are adjacent."""
    low, counts, smallest, largest = exponents(table, rows)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    if not len(starts):
        return Exponents(low, counts, smallest, largest)
    # NaN is the extreme of no finite values: any other one counts
    return Exponents(
        low,
        np.add.reduceat(counts, starts, axis=1),
        np.fmin.reduceat(smallest, starts),
        np.fmax.reduceat(largest, starts),
    )
