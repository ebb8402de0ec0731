"""Trace: local variables of chosen functions, found by path, seen where they are bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core.rooms import lazy

if TYPE_CHECKING:
    from tensortap.rooms.trace.hdf5 import HDF5
    from tensortap.rooms.trace.results import stack_padded_tensors

__all__ = ["HDF5", "stack_padded_tensors"]
__getattr__ = lazy(
    __name__,
    {
        "HDF5": "tensortap.rooms.trace.hdf5:HDF5",
        "stack_padded_tensors": "tensortap.rooms.trace.results:stack_padded_tensors",
    },
)
