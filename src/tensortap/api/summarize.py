"""`tap.summarize`: the statistics of any array or tensor."""

from __future__ import annotations

from typing import Any

from tensortap.errors import CaptureError
from tensortap.frameworks.snapshot import adapter_of, borrow
from tensortap.frameworks.view import as_numpy
from tensortap.record import Summary, TensorData
from tensortap.stats import summarize_array


def summarize(value: Any) -> Summary:
    """The statistics of an array, a tensor or a number: exact counts, figures over the finite.

    >>> summarize([1.0, -2.0]).max_abs
    2.0
    """
    if isinstance(value, (bool, int, float, complex, list, tuple)):
        import numpy

        return summarize_array(numpy.asarray(value))
    known = adapter_of(type(value)).summarize
    if known is not None:
        return known(value)
    tensor = borrow(value)
    if not isinstance(tensor, TensorData):
        raise CaptureError(f"no statistics of a {type(value).__name__}: give an array or a tensor")
    return summarize_array(as_numpy(tensor))
