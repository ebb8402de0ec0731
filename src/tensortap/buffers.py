"""Recycled memory for snapshots, in segments that another process can map.

Fresh memory costs three to four times a copy in page faults, so blocks go round: a `Lease`
is taken from a `Pool`, filled, passed along, and goes back by itself when the last reference
to it is dropped. On Linux the segments are memfds, sealed in their size: they belong to no
file system, nothing is left behind however a process ends, and whoever maps one can rely on
its size. A process of the same user reaches them under ``/proc/<pid>/fd/``.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from tensortap.limits import available_memory, total_memory

SLAB = 32 << 20  # small blocks share a segment of this size: file descriptors are scarce
_PAGE = 4096
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0x2) | getattr(fcntl, "F_SEAL_GROW", 0x4)
can_share = hasattr(os, "memfd_create")


class Block(Protocol):
    """Something that holds the bytes of a tensor."""

    @property
    def nbytes(self) -> int: ...

    @property
    def view(self) -> memoryview:
        """The bytes; waits for them where they are still on their way."""
        ...


def view_of(data: bytes | memoryview | Block) -> memoryview:
    """The bytes behind `TensorData.data`, whatever holds them."""
    if isinstance(data, (bytes, memoryview)):
        return memoryview(data).cast("B") if len(data) else memoryview(b"")
    return data.view


def size_class(nbytes: int) -> int:
    """The size of the block that serves `nbytes`: at most a quarter larger.

    >>> size_class(70_000)
    81920
    """
    size = max(nbytes, _PAGE)
    quarter = max(1 << ((size - 1).bit_length() - 3), _PAGE)
    return -(-size // quarter) * quarter


class Segment:
    """A piece of memory that is mapped once and carved into blocks of one size."""

    def __init__(self, number: int, nbytes: int, shared: bool) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd = -1
        if shared:
            self.fd = os.memfd_create("tensortap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(self.fd, nbytes)
                fcntl.fcntl(self.fd, getattr(fcntl, "F_ADD_SEALS", 1033), _SEALS)
                self.memory = mmap.mmap(self.fd, nbytes)
            except OSError:
                os.close(self.fd)
                raise
        else:
            self.memory = mmap.mmap(-1, nbytes)
        anchor = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(anchor)
        del anchor  # an export would keep the mapping from being closed
        self.out = 0  # blocks that somebody holds
        self.retired = False
        self.idle_since = time.monotonic()

    def close(self) -> None:
        """Give the memory back; whoever else has it mapped keeps it."""
        # a view that somebody still holds keeps the mapping alive until it is dropped
        with contextlib.suppress(BufferError):
            self.memory.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Lease:
    """A block of a pool, held for as long as somebody refers to it."""

    __slots__ = ("__weakref__", "_pool", "_wait", "address", "nbytes", "offset", "segment")

    def __init__(self, pool: Pool, segment: Segment, offset: int, nbytes: int) -> None:
        self._pool = pool
        self._wait: Callable[[], None] | None = None
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.address = segment.address + offset

    def fill_later(self, wait: Callable[[], None]) -> None:
        """Say that the bytes are on their way: `wait` returns when they have arrived."""
        self._wait = wait

    def settle(self) -> None:
        """Return when the bytes are there."""
        wait = self._wait
        if wait is not None:
            wait()  # before it is forgotten: another sink may ask meanwhile
            self._wait = None

    @property
    def view(self) -> memoryview:
        self.settle()
        return self.writable

    @property
    def writable(self) -> memoryview:
        """The memory itself, for whoever fills it."""
        return memoryview(self.segment.memory)[self.offset : self.offset + self.nbytes]

    def __del__(self) -> None:
        # only an append: this may run in any thread, at any point
        self._pool._returned.append((self.segment, self.offset))


class OutOfMemory(MemoryError):
    """The pool must not grow: too little memory is left on the machine."""


class Pool:
    """Blocks of memory that go round."""

    def __init__(self, *, shared: bool | None = None) -> None:
        self.shared = can_share if shared is None else shared
        self._lock = threading.Lock()
        self._free: dict[int, list[tuple[Segment, int]]] = collections.defaultdict(list)
        self._returned: collections.deque[tuple[Segment, int]] = collections.deque()
        self._numbers = itertools.count(1)
        self._segments: dict[int, Segment] = {}
        self._block: dict[int, int] = {}  # segment number → block size
        self._reserve = total_memory() // 20

    @property
    def nbytes(self) -> int:
        """All memory that the pool has taken from the machine."""
        return sum(s.nbytes for s in list(self._segments.values()))

    def acquire(self, nbytes: int) -> Lease:
        """A block of at least `nbytes`; its content is whatever was there before."""
        size = size_class(nbytes)
        with self._lock:
            free = self._free[size]
            # a block that has just come back is warm; one never used would cost page faults
            self._collect()
            if not free:
                self._grow(size)
            segment, offset = free.pop()
            segment.out += 1
        return Lease(self, segment, offset, nbytes)

    def retire(self, segment: Segment) -> None:
        """Never hand out blocks of this segment again: another process may still read them."""
        with self._lock:
            segment.retired = True
            self._collect()
            if segment.out == 0:
                self._drop(segment)
            elif segment.number in self._block:
                self._withdraw(segment)

    def trim(self, idle: float) -> list[int]:
        """Drop the segments that nobody has used for `idle` seconds; their numbers."""
        with self._lock:
            self._collect()
            limit = time.monotonic() - idle
            dropped = [s for s in self._segments.values() if not s.out and s.idle_since < limit]
            for segment in dropped:
                self._drop(segment)
        return [s.number for s in dropped]

    def _collect(self) -> None:
        while self._returned:
            segment, offset = self._returned.popleft()
            segment.out -= 1
            if segment.out == 0:
                segment.idle_since = time.monotonic()
            if not segment.retired:
                self._free[self._block[segment.number]].append((segment, offset))
            elif segment.out == 0:
                self._drop(segment)

    def _grow(self, size: int) -> None:
        blocks = max(1, SLAB // size) if size <= SLAB // 4 else 1
        nbytes = size * blocks
        if available_memory() - nbytes < self._reserve:
            raise OutOfMemory(f"no room for {nbytes} bytes: memory on this machine is running out")
        number = next(self._numbers)
        try:
            segment = Segment(number, nbytes, self.shared)
        except OSError:
            if not self.shared:
                raise
            # no descriptors left, or a limit on files: memory that only this process has will do
            segment = Segment(number, nbytes, False)
        self._segments[segment.number] = segment
        self._block[segment.number] = size
        self._free[size].extend((segment, i * size) for i in reversed(range(blocks)))

    def _drop(self, segment: Segment) -> None:
        if self._segments.pop(segment.number, None) is None:
            return
        self._withdraw(segment)
        del self._block[segment.number]
        segment.close()

    def _withdraw(self, segment: Segment) -> None:
        # in place: `acquire` holds on to this list while it collects
        free = self._free[self._block[segment.number]]
        free[:] = [entry for entry in free if entry[0] is not segment]


class Mapped:
    """A segment of another process, mapped to be read."""

    def __init__(self, pid: int, fd: int, nbytes: int) -> None:
        path = f"/proc/{pid}/fd/{fd}"
        if not os.readlink(path).startswith("/memfd:tensortap"):
            raise OSError(f"{path} is no segment of tensortap")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # sealed, or the other side could cut it short and kill whoever reads beyond
            if fcntl.fcntl(file, getattr(fcntl, "F_GET_SEALS", 1034)) & _SEALS != _SEALS:
                raise OSError(f"{path} is not sealed")
            if os.fstat(file).st_size != nbytes:
                raise OSError(f"{path} does not have {nbytes} bytes")
            self.memory = mmap.mmap(file, nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self.nbytes = nbytes
        self.slots: weakref.WeakSet[Slot] = weakref.WeakSet()

    @property
    def used(self) -> int:
        """Bytes that somebody still refers to."""
        return sum(slot.nbytes for slot in list(self.slots))


class Slot:
    """A block in a segment of another process; dropping it tells that the block is free."""

    __slots__ = ("__weakref__", "_freed", "_home", "_mapping", "nbytes", "offset", "segment")

    def __init__(
        self,
        mapping: Mapped,
        segment: int,
        offset: int,
        nbytes: int,
        freed: collections.deque[tuple[int, int]],
    ) -> None:
        self._mapping: Mapped | None = mapping
        self._home: Lease | None = None
        self._freed = freed
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        mapping.slots.add(self)

    @property
    def view(self) -> memoryview:
        # in this order: `move` sets the home first, then clears the mapping
        mapping, home = self._mapping, self._home
        if home is not None:
            return home.view
        assert mapping is not None
        return memoryview(mapping.memory)[self.offset : self.offset + self.nbytes]

    def move(self, pool: Pool) -> None:
        """Copy the bytes to this process, so that the segment can go."""
        home = pool.acquire(self.nbytes)
        home.writable[:] = self.view
        self._home = home
        self._mapping = None

    def __del__(self) -> None:
        # only an append: this may run in any thread, at any point
        self._freed.append((self.segment, self.offset))
