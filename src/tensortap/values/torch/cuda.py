"""Tensors on a CUDA device: copied to pinned memory on a side stream, and waited for later.

The training thread only queues work. If the device has room, a clone is made there first, on the
current stream, so that training may overwrite the tensor at once. Without room, the current stream
waits for the copy instead. Everything that touches the device is in `CudaPort`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tensortap.core.buffers import Lease, Pool, Segment
from tensortap.core.errors import CaptureError
from tensortap.values.torch.tensors import as_bits, tensor_over


class Courier:
    """Copies tensors from a device into leases."""

    def __init__(self, port: CudaPort) -> None:
        self.port = port
        self._lock = threading.RLock()  # a signal handler may catch something, too
        self._numbers = itertools.count()
        # a lease must not go back to its pool while the device still writes into it
        self.under_way: dict[int, tuple[Any, Lease, torch.Tensor]] = {}
        self._pinned: weakref.WeakSet[Segment] = weakref.WeakSet()

    def send(self, tensor: torch.Tensor, nbytes: int, pool: Pool) -> Lease:
        """Start to copy a tensor; return the lease that will hold it."""
        if self.port.capturing():
            raise CaptureError(
                "tensors have no values while a CUDA graph is recorded: catch them after replay"
            )
        self.reap()
        pool.prepare(whole=True)  # only the arena is pinned, as a whole
        lease = pool.acquire(nbytes)
        self._pin(lease.segment)
        source = self._stage(tensor, nbytes)
        staged = source is not None
        if source is None:
            source = tensor
        source = as_bits(source)
        event = self.port.copy(source, tensor_over(lease.writable, source))
        if not staged:
            self.port.wait(event, tensor)
        number = next(self._numbers)
        self.under_way[number] = event, lease, source
        lease.fill_later(self._arrival(number, event))
        return lease

    def reap(self) -> None:
        """Release the copies that are finished."""
        for number, (event, _, _) in list(self.under_way.items()):
            if event.query():
                self.under_way.pop(number, None)

    def _stage(self, tensor: torch.Tensor, nbytes: int) -> torch.Tensor | None:
        if not self.port.has_room(tensor, nbytes):
            return None
        try:
            return self.port.clone(tensor)
        except torch.cuda.OutOfMemoryError:  # another thread took the memory
            return None

    def _arrival(self, number: int, event: Any) -> Callable[[], None]:
        # by number, not by lease: a lease that refers to itself would never return to its pool
        def wait() -> None:
            event.synchronize()
            self.under_way.pop(number, None)

        return wait

    def _pin(self, segment: Segment) -> None:
        with self._lock:
            if not segment.number or segment in self._pinned:  # pinning is slow
                return
            self._pinned.add(segment)
        if self.port.pin(segment.address, segment.nbytes):
            # the export keeps the memory mapped until it is unpinned: another mapping at the same
            # address would pass for pinned
            export = (ctypes.c_char * 1).from_buffer(segment.memory)
            weakref.finalize(segment, _unpin, self.port, segment.address, export)


def _unpin(port: CudaPort, address: int, export: Any) -> None:
    port.unpin(address)


class CudaPort:
    """The operations on CUDA devices that copies need."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def capturing(self) -> bool:
        """Return whether the current stream is being recorded into a graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    def has_room(self, tensor: torch.Tensor, nbytes: int) -> bool:
        """Return whether the tensor's device has room for `nbytes` more."""
        if nbytes <= 1 << 20:  # the allocator has cached blocks of this size
            return True
        free, total = torch.cuda.mem_get_info(tensor.device)
        return bool(free - nbytes > total // 50)

    def pin(self, address: int, nbytes: int) -> bool:
        """Pin host memory, so that copies into it are asynchronous; return whether that worked."""
        portable = 1  # pinned for all devices of the process
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, portable)) == 0

    def unpin(self, address: int) -> None:
        with contextlib.suppress(Exception):  # at exit, CUDA may shut down first
            torch.cuda.cudart().cudaHostUnregister(address)

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy on the same device, made on the current stream."""
        if tensor.is_conj() or tensor.is_neg():
            return tensor.resolve_conj().resolve_neg().contiguous()
        return as_bits(tensor).clone(memory_format=torch.contiguous_format)

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> Any:
        """Copy to the host on a side stream, after the current one; return the event at its end."""
        stream = self._streams.get(source.device)
        if stream is None:
            stream = self._streams[source.device] = torch.cuda.Stream(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
            event = stream.record_event()
        # the allocator must not reuse its memory while the side stream reads it
        source.record_stream(stream)
        return event

    def wait(self, event: Any, tensor: torch.Tensor) -> None:
        """Make the current stream of the tensor's device wait for the event, but not the host."""
        torch.cuda.current_stream(tensor.device).wait_event(event)


@functools.cache
def cuda() -> Courier:
    return Courier(CudaPort())
