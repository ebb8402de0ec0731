"""Observed tensors whose statistics are still on a device."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tensortap.record import Kind, Summary
from tensortap.stats.packed import layout, unpack


class DeviceVector:
    """Words that a device is computing; `numpy` waits for them, in any thread."""

    __slots__ = ("_array", "_host", "_lock")

    def __init__(self, array: Any) -> None:
        self._array = array
        self._host: np.ndarray[Any, Any] | None = None
        self._lock = threading.Lock()
        if isinstance(array, jax.Array):
            array.copy_to_host_async()

    def ready(self) -> bool:
        """Return whether the device has computed the words."""
        array = self._array
        return array is None or not isinstance(array, jax.Array) or bool(array.is_ready())

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the words and release the memory of the device."""
        with self._lock:
            if self._host is None:
                with jax.transfer_guard("allow"):  # the user's guard is not meant for us
                    self._host = np.asarray(self._array).reshape(-1)
                self._array = None
            return self._host


@dataclass(frozen=True, slots=True, repr=False)
class Observation:
    """One observed tensor; `resolve` waits for its statistics, preferably in another thread.

    `part` is the path in a nested output, or the entry of an optimizer's state (``mu``). `call`
    is the index of the module's call within the intercepted function. `array` is the tensor
    itself if it is the leaf of a tree; tensors inside a function are not available.
    """

    kind: Kind
    name: str
    part: str
    type: str
    dtype: str
    shape: tuple[int, ...]
    call: int
    vector: DeviceVector
    start: int = 0
    array: Any = None

    def resolve(self) -> Summary | None:
        """Return the summary, or None if the program took another branch."""
        words = self.vector.numpy()[self.start : self.start + layout(self.dtype).words]
        return unpack(words, self.dtype, self.shape)

    def __repr__(self) -> str:
        part = f" {self.part}" if self.part else ""
        return f"<{self.kind.value} {self.name}{part} call {self.call} {self.dtype}{self.shape}>"
