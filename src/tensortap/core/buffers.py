"""Memory for snapshots: an arena that another process can map, and private memory beside it.

Page faults make a copy into fresh memory several times slower, so blocks are recycled: a `Pool`
hands out a `Lease`, which returns its block when the last reference to it is dropped. On
Linux the arena is a memfd with a sealed size: it belongs to no file system, leaves nothing behind
however a process ends, and can be mapped safely. A process of the same user opens it under
``/proc/<pid>/fd/``. Its pages are touched in the background, a little ahead of what is used, and
joined to huge pages, which takes a tenth of the time. What nobody uses goes back to the system.
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
from typing import Any, Protocol

from tensortap.core.busy import section
from tensortap.core.limits import has_room
from tensortap.core.settings import arena_size, buffer_size

PAGE = 4096
_HUGE = 2 << 20  # bytes of a huge page
_AHEAD = 16 << 20  # bytes of the arena that are ready beyond what was used
_KEPT = 10.0  # seconds after which unused memory is released
# Linux numbers: not every build of Python has names for them
_ADD_SEALS, _GET_SEALS, _SEAL_SIZE = 1033, 1034, 0x2 | 0x4
_MAP_FIXED = 0x10
_REMOVE, POPULATE_WRITE, _COLLAPSE = 9, 23, 25  # advice
can_share = hasattr(os, "memfd_create")

libc = ctypes.CDLL(None, use_errno=True)  # its functions release the GIL, unlike mmap's methods
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mmap.restype = ctypes.c_void_p
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


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


def _map(nbytes: int, protection: int, fd: int = -1) -> tuple[memoryview, int]:
    """Map private memory, or a file; return it and its address, which suits huge pages."""
    length = nbytes + _HUGE if nbytes >= _HUGE else nbytes
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, length, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    # the anchor must not outlive this: it would keep the mapping from being closed
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = -address % _HUGE if length > nbytes else 0
    view = memoryview(memory)[start : start + nbytes]
    if fd >= 0:
        # in place of a part of the mapping, which is unmapped as a whole
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if libc.mmap(address + start, nbytes, protection, flags, fd, 0) != address + start:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    elif length > nbytes and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return view, address + start


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
        self.memory, self.address = _map(nbytes, mmap.PROT_READ | mmap.PROT_WRITE, self.fd)

    def prepare(self, start: int, end: int) -> None:
        """Touch pages, so that the first copies into them are as fast as later ones."""
        # at normal priority: training would wait for the kernel's lock on the memory map while
        # a thread of low priority, which has the lock, waits for a processor
        for offset in range(start, end, _HUGE):
            place, size = self.address + offset, min(_HUGE, end - offset)
            # one page, then all: the kernel joins pages of a memfd, but creates no huge ones
            if self.fd >= 0 and size == _HUGE and not libc.madvise(place, PAGE, POPULATE_WRITE):
                if not libc.madvise(place, size, _COLLAPSE):
                    continue
            libc.madvise(place, size, POPULATE_WRITE)  # fails before Linux 5.14

    def release(self, nbytes: int) -> None:
        """Give the first pages back to the system, wherever they are mapped."""
        if self.fd >= 0:
            libc.madvise(self.address, nbytes, _REMOVE)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)  # the memory stays where it is mapped


class Lease:
    """A block of a pool; dropping the last reference returns it."""

    __slots__ = ("__weakref__", "_wait", "address", "nbytes", "offset", "segment")

    def __init__(self, segment: Segment, offset: int, nbytes: int) -> None:
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
        return self.segment.memory[self.offset : self.offset + self.nbytes]


class OutOfMemory(MemoryError):
    """The pool cannot grow: it has reached its limit, or the machine is low on memory."""


class Region:
    """A segment whose blocks are recycled."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.end = 0  # of what was ever leased
        self.ready = 0  # bytes of it that are touched, or soon will be
        self.pinned = False  # for a device: its pages stay
        self._used = False  # since `idle` was read
        self._extents: list[tuple[int, int]] = []  # free (offset, size), in order
        self._free: dict[int, list[int]] = {}  # offsets of returned blocks by size
        self._leased: dict[weakref.ref[Lease], tuple[int, int]] = {}

    @property
    def idle(self) -> bool:
        """Return whether nothing is leased, nor was since this was last read."""
        used, self._used = self._used, False
        return not used and not self._leased

    def append(self, offset: int, size: int) -> None:
        """Add memory behind all that was added before."""
        if self._extents and sum(self._extents[-1]) == offset:
            offset, before = self._extents.pop()
            size += before
        self._extents.append((offset, size))

    def lease(self, nbytes: int, returned: Callable[[object], None]) -> Lease | None:
        """Lease a block; `returned` gets the reference to it when it has gone. None: no room."""
        size = _pages(nbytes)
        offset = self._allocate(size)
        self._used = True
        if offset is None:
            return None
        lease = Lease(self.segment, offset, nbytes)
        # not __del__: no handler interrupts C code, and a full stack is no reason to fail
        self._leased[weakref.ref(lease, returned)] = offset, size
        return lease

    def give_back(self, reference: weakref.ref[Lease]) -> None:
        """Take back a block that has gone, if it was one of this region."""
        place = self._leased.get(reference)
        if place is not None:
            free = self._free.setdefault(place[1], [])
            # no call between these: Ctrl-C may raise after any call
            del self._leased[reference]
            free += (place[0],)

    def clear(self) -> None:
        """Forget all memory of which nothing is leased."""
        self._extents, self._free, self.end = [], {}, 0

    def _allocate(self, size: int) -> int | None:
        offsets = self._free.get(size)
        offset = offsets.pop() if offsets else self._carve(size)  # returned last: it is warm
        if offset is None and self._free:
            self._merge()
            offset = self._carve(size)
        if offset is not None:
            self.end = max(self.end, offset + size)
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


class Pool:
    """Memory for the snapshots of a process.

    Two regions are recycled: the arena of up to `nbytes` bytes, once `prepare` was called, and
    private memory for as much as may be queued. Blocks for which neither has room come from the
    system and go back to it; beyond `limit()` bytes in all there are no such blocks.
    """

    def __init__(
        self,
        nbytes: int | None = None,
        *,
        shared: bool | None = None,
        limit: Callable[[], int] | None = None,
    ) -> None:
        self.shared = can_share if shared is None else shared
        self.arena_is_wanted = False  # somebody waits for blocks of the arena: others leave them
        self._limit = limit
        self.nbytes = arena_size() if nbytes is None else nbytes
        self._private_nbytes = buffer_size() if nbytes is None else nbytes
        self._lock = threading.Lock()
        self._changing = threading.Lock()  # held by the thread that touches or releases pages
        self._numbers = itertools.count(1)
        self._arena: Region | None = None
        self._private: Region | None = None
        self._others: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._returned: collections.deque[Any] = collections.deque()  # references to leases
        self._tidied = time.monotonic()

    @property
    def taken(self) -> int:
        """Bytes that this pool takes: what is ready of its arena, and private memory in use."""
        arena, private = self._arena, self._private
        nbytes = arena.ready if arena is not None else 0
        nbytes += private.end if private is not None else 0
        return nbytes + sum([segment.nbytes for segment in self._others])

    @section
    def acquire(self, nbytes: int) -> Lease:
        """Return a block for `nbytes` bytes with undefined content."""
        size = _pages(nbytes)
        with self._lock:
            self._collect()
            arena, lease = self._arena, None
            if arena is not None and not self.arena_is_wanted:
                lease = arena.lease(nbytes, self._returned.append)
            private = self._private_region(size) if lease is None else None
            if private is not None:
                lease = private.lease(nbytes, self._returned.append)
            if lease is not None:
                return lease
            return Lease(self._grow(size), 0, nbytes)

    @section
    def acquire_shared(self, nbytes: int) -> Lease | None:
        """Return a block of the arena; None if it has no room."""
        arena = self._arena
        if arena is None:
            return None
        with self._lock:
            self._collect()
            return arena.lease(nbytes, self._returned.append)

    def renew(self) -> None:
        """Use new memory from now on: a server that was lost may still read the old arena."""
        self._arena = self._private = None  # no lock is needed: each is one instruction

    def prepare(self, *, whole: bool = False) -> None:
        """Create the arena if there is none; with `whole`, all of it can be leased, for good."""
        if self._arena is not None or not self.nbytes or not has_room(_AHEAD):
            return
        try:
            arena = self._arena = Region(Segment(next(self._numbers), self.nbytes, self.shared))
        except OSError:  # no file descriptors, or files have a size limit
            self.nbytes = 0
            return
        if whole and has_room(self.nbytes):
            arena.pinned, arena.ready = True, self.nbytes
            self._append(arena, 0, self.nbytes)
        self.extend()

    def extend(self, nbytes: int = 0) -> bool:
        """Touch more of the arena if it is used up, or by `nbytes`; return whether it grew."""
        arena = self._arena
        if arena is None or not self._changing.acquire(blocking=False):
            return False
        try:
            start = arena.ready
            wanted = (start + nbytes if nbytes else arena.end) + _AHEAD
            end = min(self.nbytes, -(-wanted // _HUGE) * _HUGE)
            if end <= start or not has_room(end - start):
                return False
            arena.ready = end
            arena.segment.prepare(start, end)
            self._append(arena, start, end - start)
            return True
        finally:
            self._changing.release()

    @section
    def _append(self, arena: Region, offset: int, size: int) -> None:
        with self._lock:
            arena.append(offset, size)

    def tidy(self) -> None:
        """Touch more of the arena if it is used up; release memory that nobody uses."""
        self.extend()
        now, arena = time.monotonic(), self._arena
        if now - self._tidied < _KEPT or not self._changing.acquire(blocking=False):
            return
        try:
            self._tidied = now
            if self._forget_unused(arena) and arena is not None:
                # not below the lock, for which training would wait
                arena.segment.release(arena.ready)
                arena.ready = 0
        finally:
            self._changing.release()

    @section
    def _forget_unused(self, arena: Region | None) -> bool:
        """Forget memory that was not used since the last time; return whether the arena was not."""
        with self._lock:
            self._collect()
            if self._private is not None and self._private.idle:
                self._private = None
            if arena is None or not arena.idle or not arena.end or arena.pinned:
                return False
            arena.clear()
            return True

    def _private_region(self, size: int) -> Region | None:
        """Return the private memory that is recycled; None if a block does not fit into it."""
        nbytes = self._private_nbytes
        if self._private is None and size <= nbytes and has_room(nbytes):
            self._private = Region(Segment(0, nbytes, False))
            self._private.append(0, nbytes)
        return self._private

    def _collect(self) -> None:
        for _ in range(len(self._returned)):  # a handler may return more meanwhile
            reference = self._returned[0]
            for region in (self._arena, self._private):
                if region is not None:
                    region.give_back(reference)
            del self._returned[0]  # last: Ctrl-C may raise after any call

    def _grow(self, size: int) -> Segment:
        limit = self._limit() if self._limit is not None else None
        if limit is not None and self._others and self.taken + size > limit:
            raise OutOfMemory(f"tensortap uses all of the {limit} bytes that it may take")
        # the kernel maps no more than 65,530 places
        if len(self._others) >= 4096 or not has_room(size):
            raise OutOfMemory(f"cannot allocate {size} bytes: this machine is low on memory")
        segment = Segment(0, size, False)
        self._others.add(segment)
        return segment


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE)) * PAGE


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
            self.memory = _map(nbytes, mmap.PROT_READ, file)[0].toreadonly()
        finally:
            os.close(file)
        self.nbytes = nbytes
