"""Recycled memory for snapshots, in segments that another process can map.

Page faults make a copy into fresh memory three to four times slower, so blocks are recycled: a
`Pool` hands out a `Lease`, which returns its block when the last reference to it is dropped. On
Linux the segments are memfds with a sealed size: they belong to no file system, leave nothing
behind however a process ends, and can be mapped safely. A process of the same user opens them
under ``/proc/<pid>/fd/``.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from tensortap.limits import available_memory, total_memory
from tensortap.locks import SafeLock

SLAB = 32 << 20
"""Bytes of a segment that small blocks share, because file descriptors are scarce."""

_PAGE = 4096
# Linux numbers: not every build of Python has names for them
_ADD_SEALS, _GET_SEALS, _SEAL_SIZE = 1033, 1034, 0x2 | 0x4
can_share = hasattr(os, "memfd_create")


class Block(Protocol):
    """Holds the bytes of a tensor."""

    @property
    def nbytes(self) -> int: ...

    @property
    def view(self) -> memoryview:
        """The bytes; waits for a copy that is still running."""
        ...


def view_of(data: bytes | memoryview | Block) -> memoryview:
    """Return the bytes of `TensorData.data`, whatever holds them."""
    if isinstance(data, (bytes, memoryview)):
        return memoryview(data).cast("B") if len(data) else memoryview(b"")
    return data.view


def size_class(nbytes: int) -> int:
    """Return the size of the block for `nbytes` bytes: at most a quarter larger.

    >>> size_class(70_000)
    81920
    """
    size = max(nbytes, _PAGE)
    quarter = max(1 << ((size - 1).bit_length() - 3), _PAGE)
    return -(-size // quarter) * quarter


class Segment:
    """Memory that is mapped once and divided into blocks of one size."""

    def __init__(self, number: int, nbytes: int, shared: bool) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd = -1
        if shared:
            self.fd = os.memfd_create("tensortap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(self.fd, nbytes)
                fcntl.fcntl(self.fd, _ADD_SEALS, _SEAL_SIZE)
                self.memory = mmap.mmap(self.fd, nbytes)
            except OSError:
                os.close(self.fd)
                raise
        else:
            self.memory = mmap.mmap(-1, nbytes)
        anchor = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(anchor)
        del anchor  # it would keep the mapping from being closed
        self.block_nbytes = nbytes
        self.leased = 0  # number of blocks
        self.retired = False
        self.idle_since = time.monotonic()

    def close(self) -> None:
        """Free the memory; other processes that have mapped it keep it."""
        # a view that is still in use keeps the mapping alive
        with contextlib.suppress(BufferError):
            self.memory.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Lease:
    """A block of a pool; dropping the last reference returns it."""

    __slots__ = ("__weakref__", "_pool", "_wait", "address", "nbytes", "offset", "segment")

    def __init__(self, pool: Pool, segment: Segment, offset: int, nbytes: int) -> None:
        self._pool = pool
        self._wait: Callable[[], None] | None = None
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.address = segment.address + offset

    def fill_later(self, wait: Callable[[], None]) -> None:
        """Announce a copy into this block that still runs; `wait` returns when it is done."""
        self._wait = wait

    def settle(self) -> None:
        """Wait until the bytes have been copied."""
        wait = self._wait
        if wait is not None:
            wait()  # first: another thread may call settle meanwhile
            self._wait = None

    @property
    def view(self) -> memoryview:
        self.settle()
        return self.writable

    @property
    def writable(self) -> memoryview:
        """The memory, to be filled."""
        return memoryview(self.segment.memory)[self.offset : self.offset + self.nbytes]

    def __del__(self) -> None:
        # only an append: this runs in any thread, at any point
        if self.segment.number:  # else it belongs to no pool
            self._pool._returned.append((self.segment, self.offset))


class OutOfMemory(MemoryError):
    """The pool cannot grow: it has reached its limit, or the machine is low on memory."""


class Pool:
    """Recycled blocks of memory; beyond `limit()` bytes there are no new ones."""

    def __init__(
        self, *, shared: bool | None = None, limit: Callable[[], int] | None = None
    ) -> None:
        self.shared = can_share if shared is None else shared
        self._limit = limit
        self._lock = SafeLock()
        self._free: dict[int, list[tuple[Segment, int]]] = collections.defaultdict(list)
        self._returned: collections.deque[tuple[Segment, int]] = collections.deque()
        self._numbers = itertools.count(1)
        self._segments: dict[int, Segment] = {}
        self._reserve = total_memory() // 20

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(s.nbytes for s in list(self._segments.values()))

    def acquire(self, nbytes: int) -> Lease:
        """Return a block for `nbytes` bytes with undefined content."""
        size = size_class(nbytes)
        if not self._lock.acquire():  # in a signal handler or finalizer that interrupted us
            return Lease(self, Segment(0, size, shared=False), 0, nbytes)
        try:
            free = self._free[size]
            # blocks returned last are used first: they are warm
            self._collect()
            if not free:
                self._grow(size)
            segment, offset = free.pop()
            segment.leased += 1
        finally:
            self._lock.release()
        return Lease(self, segment, offset, nbytes)

    def retire(self, segment: Segment) -> None:
        """Never lease blocks of this segment again: another process may still read them."""
        segment.retired = True
        if self._lock.acquire():
            try:
                self._collect()
                if segment.leased == 0:
                    self._free_segment(segment)
                elif segment.number in self._segments:
                    self._withdraw(segment)
            finally:
                self._lock.release()

    def trim(self, idle: float) -> list[int]:
        """Free segments that were unused for `idle` seconds; return their numbers."""
        if not self._lock.acquire():
            return []
        try:
            self._collect()
            limit = time.monotonic() - idle
            unused = [s for s in self._segments.values() if not s.leased and s.idle_since < limit]
            for segment in unused:
                self._free_segment(segment)
        finally:
            self._lock.release()
        return [s.number for s in unused]

    def _collect(self) -> None:
        for _ in range(len(self._returned)):  # a handler may return more meanwhile
            segment, offset = self._returned.popleft()
            segment.leased -= 1
            if segment.leased == 0:
                segment.idle_since = time.monotonic()
            if not segment.retired:
                self._free[segment.block_nbytes].append((segment, offset))
            elif segment.leased == 0:
                self._free_segment(segment)

    def _grow(self, size: int) -> None:
        slab = SLAB
        if self._limit is not None:
            limit = self._limit()
            slab = min(SLAB, max(limit // 32, 1 << 20))
            if self.nbytes > limit:
                for segment in [s for s in self._segments.values() if not s.leased]:
                    self._free_segment(segment)  # its blocks have another size
            if self.nbytes > limit:
                raise OutOfMemory(f"tensortap uses all of the {limit} bytes that it may take")
        blocks = max(1, slab // size) if size <= slab // 4 else 1
        nbytes = size * blocks
        if available_memory() - nbytes < self._reserve:
            raise OutOfMemory(f"cannot allocate {nbytes} bytes: this machine is low on memory")
        number = next(self._numbers)
        try:
            segment = Segment(number, nbytes, self.shared)
        except OSError:
            if not self.shared:
                raise
            # no file descriptors left: use memory that cannot be shared
            segment = Segment(number, nbytes, False)
        self._segments[segment.number] = segment
        segment.block_nbytes = size
        self._free[size].extend((segment, i * size) for i in reversed(range(blocks)))

    def _free_segment(self, segment: Segment) -> None:
        if self._segments.pop(segment.number, None) is None:
            return
        self._withdraw(segment)
        segment.close()

    def _withdraw(self, segment: Segment) -> None:
        # in place: `acquire` has a reference to this list
        free = self._free[segment.block_nbytes]
        free[:] = [entry for entry in free if entry[0] is not segment]


class MappedSegment:
    """A segment of another process, mapped read-only."""

    def __init__(self, pid: int, fd: int, nbytes: int) -> None:
        path = f"/proc/{pid}/fd/{fd}"
        if not os.readlink(path).startswith("/memfd:tensortap"):
            raise OSError(f"{path} is not a tensortap segment")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # without seals its owner could shrink it, and reading would raise SIGBUS
            if fcntl.fcntl(file, _GET_SEALS) & _SEAL_SIZE != _SEAL_SIZE:
                raise OSError(f"{path} is not sealed")
            if os.fstat(file).st_size != nbytes:
                raise OSError(f"{path} does not have {nbytes} bytes")
            self.memory = mmap.mmap(file, nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self.nbytes = nbytes
        self.blocks: weakref.WeakSet[RemoteBlock] = weakref.WeakSet()

    @property
    def used(self) -> int:
        """Bytes of the blocks that are still referenced."""
        return sum(block.nbytes for block in list(self.blocks))


class RemoteBlock:
    """A block in a segment of another process; dropping it adds it to `freed`."""

    __slots__ = ("__weakref__", "_copy", "_freed", "_mapped", "nbytes", "offset", "segment")

    def __init__(
        self,
        mapped: MappedSegment,
        segment: int,
        offset: int,
        nbytes: int,
        freed: collections.deque[tuple[int, int]],
    ) -> None:
        self._mapped: MappedSegment | None = mapped
        self._copy: Lease | None = None
        self._freed = freed
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        mapped.blocks.add(self)

    @property
    def view(self) -> memoryview:
        # in this order: `copy_to` sets the copy first, then clears the mapping
        mapped, copy = self._mapped, self._copy
        if copy is not None:
            return copy.view
        assert mapped is not None
        return memoryview(mapped.memory)[self.offset : self.offset + self.nbytes]

    def copy_to(self, pool: Pool) -> None:
        """Copy the bytes into this process, so that the segment can be unmapped."""
        copy = pool.acquire(self.nbytes)
        copy.writable[:] = self.view
        self._copy = copy
        self._mapped = None

    def __del__(self) -> None:
        # only an append: this runs in any thread, at any point
        self._freed.append((self.segment, self.offset))
