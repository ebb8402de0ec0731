"""Numbers for equal values: which rows belong to the same group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

_SPARSE = 4  # times as many possible codes as rows are looked up in an array, more are sorted


def codes(*columns: Any) -> Integers:
    """Return numbers from 0 on that are equal where all columns are, in the order of the columns.

    >>> codes(np.array([7, 5, 7]), np.array([0, 0, 0]))
    array([1, 0, 1])
    """
    found, size = _numbered(columns[0])
    for column in columns[1:]:
        more, width = _numbered(column)
        if size * width > _SPARSE * len(found):
            found = _dense(found, size)
            size = int(found.max(initial=0)) + 1
        found *= width
        found += more
        size *= width
    return _dense(found, size)


def _numbered(values: NDArray[Any]) -> tuple[Integers, int]:
    """Return a copy of values from 0 on in the same order, and the largest one plus 1."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low > _SPARSE * len(values):
        found = np.unique(values, return_inverse=True)[1].astype(np.int64, copy=False)
        return found, int(found.max(initial=0)) + 1
    shifted = values.astype(np.int64)
    shifted -= low
    return shifted, high - low + 1


def _dense(values: Integers, size: int) -> Integers:
    """Return the same values, which are below `size`, numbered from 0 on without gaps."""
    if size > _SPARSE * len(values):
        values, size = _numbered(values)
    seen = np.zeros(size, np.bool_)
    seen[values] = True
    return values if seen.all() else (np.cumsum(seen) - 1)[values]


def first_of(groups: Integers) -> Integers:
    """Return the position of the first member of each group.

    >>> first_of(np.array([1, 0, 1]))
    array([1, 0])
    """
    first = np.empty(int(groups.max(initial=-1)) + 1, np.int64)
    first[groups[::-1]] = np.arange(len(groups))[::-1]  # of several, the last one stays
    return first
