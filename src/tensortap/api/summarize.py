"""`tap.summarize`: the statistics of any array or tensor."""

from __future__ import annotations

from typing import Any

from tensortap.frameworks.snapshot import summary_of
from tensortap.record import Summary
from tensortap.stats import summarize_array


def summarize(value: Any) -> Summary:
    """Return the statistics of an array, a tensor or a number.

    >>> summarize([1.0, -2.0]).max_abs
    2.0
    """
    if isinstance(value, (bool, int, float, complex, list, tuple)):
        import numpy

        return summarize_array(numpy.asarray(value))
    summary, pending = summary_of(value)
    result = summary if pending is None else pending.resolve()
    assert result is not None
    return result
