"""What a frame is drawn from: the tensor of a record, its statistics and its names."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.frameworks.view import as_numpy
from tensortap.readers.reader import value_of
from tensortap.record import Number, Record, TensorData
from tensortap.stats import summarize_array
from tensortap.stats.conversion import is_number


class FrameContent:
    """A record as a frame shows it; `array` is None if the value has no numbers."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.array, dtype, shape = _array(value_of(record))
        self.dtype = dtype or record.dtype
        self.shape = shape if dtype else record.shape
        self.summary = record.stats
        if self.summary is None and self.array is not None:
            self.summary = summarize_array(self.array)
        self.device = record.tags.get("device", "")
        self.message = record.tags.get("message", "")

    @functools.cached_property
    def inner(self) -> tuple[int, ...]:
        """Return the shape without its leading ones: ``[1, W, H]`` is a matrix."""
        shape = self.shape
        while shape and shape[0] == 1:
            shape = shape[1:]
        return shape

    @property
    def has_matrix(self) -> bool:
        """Return whether the tensor is a matrix."""
        return self.array is not None and len(self.inner) == 2 and self.array.size > 0

    @property
    def is_finite(self) -> bool:
        """Return whether all values are known to be finite."""
        return self.summary is not None and self.summary.finite == self.summary.count

    def reshaped(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the tensor in another shape."""
        assert self.array is not None
        return self.array.reshape(shape)


def _array(value: Any) -> tuple[NDArray[Any] | None, str, tuple[int, ...]]:
    """Return the numbers of a value, their dtype and shape."""
    if isinstance(value, TensorData):
        array = as_numpy(value)
        return (array if is_number(array.dtype) else None), value.dtype, value.shape
    if isinstance(value, Number) and value.kind == "complex" and len(value.parts) == 2:
        return np.asarray(complex(*value.parts)), "complex", ()
    if isinstance(value, Number) and value.text:
        try:
            return np.asarray(float(int(value.text, 16))), "int", ()
        except (ValueError, OverflowError):
            return None, "int", ()
    if isinstance(value, (bool, int, float)):
        kind = np.bool_ if isinstance(value, bool) else np.float64
        return np.asarray(value, kind), type(value).__name__, ()
    return None, "", ()
