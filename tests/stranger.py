"""A framework and a sink of another package, as a room offers them."""

from __future__ import annotations

import numpy as np

from tensortap.core.record import TensorData
from tensortap.rooms.track.memory import MemorySink
from tensortap.values.protocol import Adapter, Framework


class Quantity:
    """An array with a unit, which only the framework below knows."""

    def __init__(self, array):
        self.array = array


class _Quantities(Framework):
    name = "quantities"

    def adapter(self, cls):
        return (
            Adapter(_snapshot, lambda value, path: value.array.nbytes) if cls is Quantity else None
        )

    def rebuild(self, tensor):
        array = np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
        return Quantity(array.copy())


def _snapshot(value, pool, path):
    array = value.array
    return TensorData("quantities", array.dtype.name, array.shape, array.tobytes()), array.nbytes


FRAMEWORK = _Quantities()
sinks: list[MemorySink] = []


def sink(run):
    """Return a sink for a run that has been opened."""
    sinks.append(MemorySink())
    return sinks[-1]


def no_sink(run):
    """Return None, as a sink that the user has not asked for."""


def broken_sink(run):
    """Fail, as a sink without its service does."""
    raise OSError("no disk")
