"""JAX behind the `Framework` protocol.

An array is read in place if it is ready. Otherwise it is copied on its device, asynchronously: it
may still be computing when it is caught, and may be donated or deleted right after. `Deferred`
holds that copy, and whoever needs the bytes waits for them.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from tensortap.core.buffers import Pool
from tensortap.core.dtypes import DTYPES, name_of
from tensortap.core.errors import CaptureError
from tensortap.core.record import Summary, TensorData
from tensortap.stats import summarize_array
from tensortap.values.numpy.adapter import build as build_numpy
from tensortap.values.numpy.adapter import describe
from tensortap.values.protocol import Adapter, Framework, Path, Snapshot, rejecting
from tensortap.values.view import as_numpy, payload_at

# dtypes that JAX narrows to 32 bits unless jax_enable_x64 is set
_WIDE = {row.name for row in DTYPES.values() if DTYPES.get(row.part, row).bits == 64}

# dtypes of which several elements share a byte of the device's memory, also on the CPU
_PACKED = {row.name for row in DTYPES.values() if row.kind != "bool" and row.bits in (1, 2, 4)}


class JaxFramework(Framework):
    name = "jax"

    def adapter(self, cls: type) -> Adapter | None:
        if Tracer in cls.__mro__:
            return _TRACER
        return _ARRAY if jax.Array in cls.__mro__ else None

    def rebuild(self, tensor: TensorData) -> Any:
        """Return an array on the CPU; NumPy's if JAX would change it or lacks the dtype.

        Without ``jax_enable_x64`` a 64-bit array claims its dtype but computes in 32 bits, so
        64-bit arrays come back as NumPy's there.
        """
        array = build_numpy(tensor)
        if tensor.dtype in _WIDE and not jax.config.jax_enable_x64:
            return array
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            try:
                with jax.default_device(jax.local_devices(backend="cpu")[0]):
                    built = jax.device_put(array)
            except (RuntimeError, TypeError, ValueError):
                return array
        return built if built.dtype == array.dtype else array

    def traced_classes(self) -> Iterable[type]:
        classes: list[type] = [Tracer]
        while classes:
            cls = classes.pop()
            yield cls
            classes += cls.__subclasses__()

    def catch_when_run(
        self, value: Any, capture: Callable[..., object], when: Any
    ) -> Callable[[], object]:
        """Make the compiled function call back with the whole value, under all transformations.

        It does so for each iteration of a `scan`, for each element under `vmap`, on each device
        in `shard_map`, and again, with a tag, where `jax.checkpoint` recomputes the value.
        """
        from tensortap.values.jax.runs import call_back, manual_axes

        reject_random_keys(value.dtype)
        # NumPy, because JAX must not compute in a callback: the thread for it waits for us
        condition = (lambda value: when(np.asarray(value))) if callable(when) else when
        captured = functools.partial(capture, when=condition)
        call_back(captured, jax.lax.stop_gradient(value), manual_axes())
        wait: Callable[[], object] = jax.effects_barrier
        return wait

    def catch_gradient(self, value: Any, capture: Callable[[Any], object]) -> Any:
        if not isinstance(value, jax.Array):
            return None
        from tensortap.values.jax.runs import catch_gradient

        return catch_gradient(value, capture)


FRAMEWORK = JaxFramework()


class Deferred:
    """The bytes of an array that is still being computed; `view` waits for them, in any thread."""

    __slots__ = ("_array", "_lock", "_view", "nbytes")

    def __init__(self, array: Any, nbytes: int) -> None:
        self._array = array
        self._view: memoryview | None = None
        self._lock = threading.RLock()  # a signal handler may wait as well
        self.nbytes = nbytes
        if isinstance(array, jax.Array):
            # here and below: the user's guard is meant for the user's own transfers
            with jax.transfer_guard("allow"):
                array.copy_to_host_async()

    def ready(self) -> bool:
        array = self._array
        return not isinstance(array, jax.Array) or bool(array.is_ready())

    def settle(self) -> None:
        """Wait for the bytes, then free the device memory."""
        with self._lock:  # several sinks may wait at once
            if self._view is not None:
                return
            try:
                with jax.transfer_guard("allow"):
                    host = np.ascontiguousarray(np.asarray(self._array))
            except Exception as error:  # the computation that made the array failed
                raise CaptureError(f"the array was never computed: {error}") from error
            self._view = host.reshape(-1).view(np.uint8).data.toreadonly()
            self._array = None

    @property
    def view(self) -> memoryview:
        self.settle()
        assert self._view is not None
        return self._view


def _snapshot(value: Any, pool: Pool | None, path: Path) -> Snapshot:
    if value.is_deleted():
        raise CaptureError(
            "this array has been donated or deleted: catch it before the call that takes it"
        )
    dtype = value.dtype
    reject_random_keys(dtype)
    name, shape = name_of(dtype), value.shape
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return TensorData("jax", name, shape, b""), 0
    if name not in _PACKED and _can_be_read(value):
        data = payload_at(value.unsafe_buffer_pointer(), nbytes, pool)
        return TensorData("jax", name, shape, data), nbytes
    if not value.is_fully_addressable:
        raise CaptureError(
            "parts of this array are on other hosts: catch array.addressable_shards[i].data, or "
            "jax.experimental.multihost_utils.process_allgather(array)"
        )
    return TensorData("jax", name, shape, Deferred(_copy(value), nbytes)), nbytes


def reject_random_keys(dtype: Any) -> None:
    if not isinstance(dtype, np.dtype):
        raise CaptureError(
            f"an array of {dtype} holds random keys, not numbers: catch jax.random.key_data(key)"
        )


def _can_be_read(value: Any) -> bool:
    """Return whether the bytes are in this process's memory, computed and in C order."""
    devices = value.sharding.device_set
    if len(devices) != 1 or next(iter(devices)).platform != "cpu" or not value.is_ready():
        return False
    axes = range(value.ndim)
    return value.ndim < 2 or bool(value.format.layout.major_to_minor == tuple(axes))


def _copy(value: Any) -> Any:
    # inside a jit this would be traced; there the array is a constant and can be copied now
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        return jax.device_put(value, value.sharding, may_alias=False)


def _nbytes(value: Any, path: Path) -> int:
    return int(math.prod(value.shape) * getattr(value.dtype, "itemsize", 0))


def _describe(value: Any) -> tuple[str, tuple[int, ...]]:
    if isinstance(value.dtype, np.dtype):
        return describe(value)
    return str(value.dtype), tuple(value.shape)


def _summarize(value: Any) -> Summary:
    node, _ = _snapshot(value, None, ())
    assert isinstance(node, TensorData)
    return summarize_array(as_numpy(node))


def _reject_copy(value: Any) -> Any:
    raise CaptureError(
        "JAX only traces this function, so its values do not exist yet: trace the function that "
        "calls the compiled one, or use tap.catch(...) inside"
    )


_ARRAY = Adapter(
    _snapshot, _nbytes, _describe, summarize=_summarize, view=lambda value: None,
    copy=lambda value: jax.numpy.array(value, copy=True),  # the original may be donated
)  # fmt: skip
_TRACER = replace(
    rejecting(
        "inside jit, grad or vmap an array has no value yet: return it from the function and "
        "catch the result, or use tap.track"
    ),
    copy=_reject_copy,
)
