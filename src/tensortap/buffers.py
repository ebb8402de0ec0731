"""Memory for snapshots: an arena that another process can map, and private memory beside it.

Page faults make a copy into fresh memory several times slower, so blocks of the arena are recycled:
a `Pool` hands out a `Lease`, which returns its block when the last reference to it is dropped. On
Linux the arena is a memfd with a sealed size: it belongs to no file system, leaves nothing behind
however a process ends, and can be mapped safely. A process of the same user opens it under
``/proc/<pid>/fd/``.
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
from collections.abc import Callable
from typing import Protocol

from tensortap.limits import has_room
from tensortap.locks import SafeLock
from tensortap.settings import arena_size

_PAGE = 4096
_HUGE = 4 << 20  # bytes from which on huge pages help
_PREPARED_AT_ONCE = 1 << 16  # bytes; mapping memory waits meanwhile
_LONGEST_PAUSE = 0.01  # seconds between two of these pieces
# Linux numbers: not every build of Python has names for them
_ADD_SEALS, _GET_SEALS, _SEAL_SIZE = 1033, 1034, 0x2 | 0x4
_MADV_POPULATE_WRITE = 23
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


class Segment:
    """Memory that is mapped at once; `number` is 0 for memory outside the arena."""

    fd = -1

    def __init__(self, number: int, nbytes: int, shared: bool) -> None:
        self.number = number
        self.nbytes = nbytes
        if shared:
            self.fd = os.memfd_create("tensortap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, _ADD_SEALS, _SEAL_SIZE)
            self.memory = mmap.mmap(self.fd, nbytes)
        else:
            self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):
                    self.memory.madvise(mmap.MADV_HUGEPAGE)
        anchor = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(anchor)
        del anchor  # it would keep the mapping from being closed

    def prepare(self) -> None:
        """Touch all pages, so that the first copies into them are as fast as later ones."""
        # small pieces at normal priority: training would wait for the kernel's lock on the
        # memory map while a thread of low priority, which has the lock, waits for a processor
        madvise = ctypes.CDLL(None).madvise  # releases the GIL, unlike the method of mmap
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for offset in range(0, self.nbytes, _PREPARED_AT_ONCE):
            start = time.perf_counter()
            piece = min(_PREPARED_AT_ONCE, self.nbytes - offset)
            if madvise(self.address + offset, piece, _MADV_POPULATE_WRITE):
                return  # Linux before 5.14
            time.sleep(min(_LONGEST_PAUSE, time.perf_counter() - start))

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)  # the memory stays where it is mapped


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
        # only one operation without a lock: this runs in any thread, at any point
        if self.segment.number:
            self._pool._returned.append((self.segment, self.offset, _pages(self.nbytes)))
        else:
            self._pool._private.pop(id(self), None)


class OutOfMemory(MemoryError):
    """The pool cannot grow: it has reached its limit, or the machine is low on memory."""


class Pool:
    """The arena of a process, and private memory for what does not fit into it.

    Beyond `limit()` bytes in all there is no more private memory.
    """

    def __init__(
        self,
        nbytes: int | None = None,
        *,
        shared: bool | None = None,
        limit: Callable[[], int] | None = None,
    ) -> None:
        self.shared = can_share if shared is None else shared
        self._limit = limit
        self.nbytes = arena_size() if nbytes is None else nbytes
        self._lock = SafeLock()
        self._numbers = itertools.count(1)
        self._arena: Segment | None = None
        self._extents: list[tuple[int, int]] = []  # free (offset, size), in order
        self._free: dict[int, list[int]] = {}  # offsets of returned blocks by size
        self._returned: collections.deque[tuple[Segment, int, int]] = collections.deque()
        self._private: dict[int, int] = {}  # bytes of private leases by their id
        self._prepared = False

    @property
    def taken(self) -> int:
        """Bytes that this pool takes: its arena, and private memory."""
        arena = self._arena.nbytes if self._arena is not None else 0
        return arena + sum(list(self._private.values()))

    def acquire(self, nbytes: int) -> Lease:
        """Return a block for `nbytes` bytes with undefined content."""
        lease = self.acquire_shared(nbytes)
        if lease is None:
            size = _pages(nbytes)
            limit = self._limit() if self._limit is not None else None
            if limit is not None and self._private and self.taken + size > limit:
                raise OutOfMemory(f"tensortap uses all of the {limit} bytes that it may take")
            if size >= _HUGE:  # reading what is free takes longer than a small copy
                self._check_memory(size)
            lease = Lease(self, Segment(0, size, False), 0, nbytes)
            self._private[id(lease)] = size
        return lease

    def acquire_shared(self, nbytes: int) -> Lease | None:
        """Return a block of the arena; None if it has no room."""
        size = _pages(nbytes)
        # no lock in a signal handler or finalizer that interrupted us
        if size > self.nbytes or not self._lock.acquire():
            return None
        try:
            arena = self._arena or self._create()
            offset = self._allocate(arena, size)
        except OutOfMemory:
            return None
        except OSError:  # no file descriptors, or files have a size limit
            self.nbytes = 0
            return None
        finally:
            self._lock.release()
        return None if offset is None else Lease(self, arena, offset, nbytes)

    def renew(self) -> None:
        """Use a new arena from now on: a server that was lost may still read the old one."""
        self._arena = None  # one statement: no lock is needed
        self._prepared = False

    def prepare(self) -> None:
        """Touch the pages of the arena in the background."""
        lease = self.acquire_shared(1)
        if lease is not None and not self._prepared:
            self._prepared = True
            target = lease.segment.prepare
            threading.Thread(target=target, name="tensortap-arena", daemon=True).start()

    def _create(self) -> Segment:
        self._check_memory(self.nbytes)
        arena = Segment(next(self._numbers), self.nbytes, self.shared)
        self._extents = [(0, self.nbytes)]
        self._free.clear()
        self._arena = arena
        return arena

    def _allocate(self, arena: Segment, size: int) -> int | None:
        for _ in range(len(self._returned)):  # a handler may return more meanwhile
            segment, returned, nbytes = self._returned.popleft()
            if segment is arena:
                self._free.setdefault(nbytes, []).append(returned)
        offsets = self._free.get(size)
        if offsets:
            return offsets.pop()  # the block returned last is warm
        offset = self._carve(size)
        if offset is None and self._free:
            self._merge()
            offset = self._carve(size)
        return offset

    def _carve(self, size: int) -> int | None:
        """Take `size` bytes from the first free extent that is large enough."""
        for i, (offset, free) in enumerate(self._extents):
            if free >= size:
                self._extents[i : i + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        return None

    def _merge(self) -> None:
        """Join the returned blocks to free extents."""
        blocks = [(offset, size) for size, offsets in self._free.items() for offset in offsets]
        self._free.clear()
        merged: list[tuple[int, int]] = []
        for offset, size in sorted(self._extents + blocks):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._extents = merged

    def _check_memory(self, nbytes: int) -> None:
        if not has_room(nbytes):
            raise OutOfMemory(f"cannot allocate {nbytes} bytes: this machine is low on memory")


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // _PAGE)) * _PAGE


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
