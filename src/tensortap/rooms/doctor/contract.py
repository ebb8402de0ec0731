"""Check the promises of a framework about its values, on any device.

The tests of a framework subclass its contract; `tensortap doctor --device` checks it where the user
is. A check raises AssertionError. `assert` is not used: `python -O` would remove it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.core.buffers import Pool, view_of
from tensortap.core.dtypes import DTYPES, itemsize, numpy_dtype
from tensortap.core.record import Summary, TensorData
from tensortap.rooms.track.packed import summary_of
from tensortap.stats import summarize_array
from tensortap.stats.digest import digest
from tensortap.values.protocol import SMALL
from tensortap.values.rebuild import rebuild
from tensortap.values.snapshot import describe, digest_of, nbytes_of, snapshot
from tensortap.values.view import as_numpy

SHAPES = ((), (0, 3), (3, 4, 5), (40, 30, 25))
_POOL = Pool()
_COUNTS = ("count", "zeros", "nans", "posinfs", "neginfs", "exponents")
_FIGURES = "min max mean std mean_abs max_abs min_abs rm2 rm4 rm8".split()


def expect(found: object, wanted: object, what: str) -> None:
    """Raise AssertionError unless both are equal."""
    if found != wanted:
        raise AssertionError(f"{what}: {found!r:.80} instead of {wanted!r:.80}")


def any_values(name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array in which every bit pattern of the dtype may occur."""
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, int(np.prod(shape)) * itemsize(name), np.uint8)
    row = DTYPES[name]
    if row.bits < 8:
        raw &= (1 << row.bits) - 1
    array: NDArray[Any] = raw.view(numpy_dtype(name)).reshape(shape)
    # the upper bits of a narrow signed integer repeat its sign
    return array.astype(np.int8).astype(array.dtype) if row.kind == "int" and row.numpy else array


def expect_close(found: Summary | None, known: Summary) -> None:
    """Check statistics of a device: counts are exact, figures have the precision of float32."""
    for name in _COUNTS:
        expect(getattr(found, name), getattr(known, name), name)
    for name in _FIGURES:
        one, other = getattr(found, name), getattr(known, name)
        room = 1e-5 * (known.mean_abs if name == "mean" else abs(other))
        if name == "std":  # float32 rounds the inputs if the mean is large
            room = max(room, 1e-7 * known.mean_abs)
        if not (math.isnan(one) if math.isnan(other) else abs(one - other) <= room or one == other):
            raise AssertionError(f"{name}: {one!r} instead of {other!r}")


class Contract:
    """Subclass this, set `framework` and `dtypes`, and say how tensors are made and read."""

    framework: str
    dtypes: tuple[str, ...]
    asynchronous = True
    """Captures promise not to wait for the device."""
    device: Any = None
    """Where the tensors are; None is the CPU."""

    def tensor(self, array: NDArray[Any], dtype: str) -> Any:
        """Return a tensor on the device with the bytes of an array."""
        raise NotImplementedError

    def contents(self, tensor: Any) -> bytes:
        """Return the bytes of a tensor in C order, by other means than the adapter's."""
        raise NotImplementedError

    def overwrite(self, tensor: Any) -> None:
        """Change or delete the tensor, as training may do right after a capture."""

    def work(self, times: int) -> Any:
        """Start to multiply matrices on the device; return the product without waiting."""
        raise NotImplementedError

    def observer(self, track: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Return a context whose target is a function that shows a tensor to a tracker."""
        raise NotImplementedError

    def train(self, track: Callable[..., Any] | None) -> Iterator[bytes]:
        """Train a small model, tracked if `track` is given; yield its bits after each step."""
        raise NotImplementedError

    def one(self, dtype: str = "float32", shape: tuple[int, ...] = (3, 4, 5)) -> Any:
        return self.tensor(any_values(dtype, shape), dtype)

    def check_snapshots(self, dtype: str) -> None:
        """Check that snapshots and rebuilt tensors have the bytes of the tensor."""
        for shape in SHAPES:
            value = self.one(dtype, shape)
            node, nbytes = snapshot(value, _POOL)
            assert isinstance(node, TensorData)
            kind = self.framework, dtype, shape
            expect((node.framework, node.dtype, node.shape), kind, "kind")
            expect((nbytes, view_of(node.data).nbytes), (nbytes_of(value),) * 2, "bytes")
            expect(describe(value)[1:], kind[1:], "description")
            if nbytes <= SMALL and not hasattr(node.data, "settle"):
                expect(type(node.data), bytes, "payload")
            rebuilt = rebuild(node)
            expect(type(rebuilt), type(value), "rebuilt class")
            expect(describe(rebuilt)[1:], kind[1:], "rebuilt description")
            expect(self.contents(rebuilt), self.contents(value), "rebuilt bytes")

    def check_digests(self, dtype: str) -> None:
        """Check that digests are those of the contents."""
        value = self.one(dtype)
        same = TensorData("numpy", dtype, (3, 4, 5), self.contents(value))
        expect(digest_of(value), digest(same), "digest")
        other = digest_of(self.tensor(any_values(dtype, (3, 20)), dtype))
        expect(digest_of(value) != other, True, "digests differ")

    def check_statistics(self, dtype: str) -> None:
        """Check statistics against those of the same bytes on the CPU."""
        value = self.one(dtype, (40, 30, 25))
        node = TensorData("numpy", dtype, (40, 30, 25), self.contents(value))
        known, (found, pending) = summarize_array(as_numpy(node)), summary_of(value)
        if pending is None:
            expect(repr(found), repr(known), "statistics")
        else:
            expect_close(pending.resolve(), known)

    def measure_wait(self, capture: Callable[[Any], object]) -> tuple[float, float] | None:
        """Return the seconds until a capture returned, and until its value had been computed.

        None if the device computes at once.
        """
        self._wait(1, capture)  # the first one loads kernels
        times, queued, computed = 1, 0.0, 0.0
        while queued + computed < 0.1 and times < 1 << 20:
            times *= 4
            queued, _, computed = self._wait(times, lambda _: None)
        if queued > computed:
            return None
        return min(self._wait(times, capture)[1:] for _ in range(3))  # others may take the time

    def _wait(self, times: int, capture: Callable[[Any], object]) -> tuple[float, float, float]:
        """Return the seconds to start work; then until it was captured, and computed."""
        start = time.perf_counter()
        value = self.work(times)
        queued = time.perf_counter()
        capture(value)
        captured = time.perf_counter()
        self.contents(value)
        return queued - start, captured - queued, time.perf_counter() - queued
