"""What a frame is drawn from: the tensor of a record, its figures and its names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.frameworks.view import as_numpy
from tensortap.readers.reader import value_of
from tensortap.record import Kind, Number, Record, Summary, TensorData
from tensortap.stats import summarize_array
from tensortap.viz.reals import is_number

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Look(NamedTuple):
    """A record as a frame shows it.

    `array` is None where there are no numbers; `matrix` where there are no two axes.
    """

    name: str
    kind: Kind
    step: int
    rank: int
    world_size: int
    device: str
    message: str
    dtype: str
    shape: tuple[int, ...]
    array: NDArray[Any] | None
    summary: Summary | None

    @property
    def inner(self) -> tuple[int, ...]:
        """The shape without its leading ones."""
        shape = self.shape
        while shape and shape[0] == 1:
            shape = shape[1:]
        return shape

    @property
    def matrix(self) -> NDArray[Any] | None:
        """The tensor as a matrix, if it is one."""
        if self.array is None or len(self.inner) != 2 or not self.array.size:
            return None
        return self.array.reshape(self.inner)

    @property
    def is_scalar(self) -> bool:
        """Whether it is one number."""
        return self.array is not None and self.array.size == 1 and not self.inner


def look_at(record: Record) -> Look:
    """The tensor of a record, or the number; of others what is known about them."""
    value = value_of(record)
    array, dtype, shape = _array(value)
    summary = record.stats
    if summary is None and array is not None:
        summary = summarize_array(array)
    return Look(
        name=record.name,
        kind=record.kind,
        step=record.step,
        rank=record.rank,
        world_size=record.world_size,
        device=record.tags.get("device", ""),
        message=record.tags.get("message", ""),
        dtype=dtype or record.dtype,
        shape=shape if dtype else record.shape,
        array=array,
        summary=summary,
    )


def _array(value: Any) -> tuple[NDArray[Any] | None, str, tuple[int, ...]]:
    import numpy as np

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
