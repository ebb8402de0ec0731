"""Memory for payloads that is touched before it is needed.

While a history grows, every payload goes to fresh memory, and the page faults of a megabyte take
several times as long as its copy. A thread takes them in advance, without the interpreter lock.
"""

from __future__ import annotations

import collections
import ctypes
import mmap
import threading
import time
import weakref

import numpy as np
from numpy.typing import NDArray

from tensortap.core.buffers import PAGE, POPULATE_WRITE, can_share, libc
from tensortap.core.history import History
from tensortap.core.limits import has_room

_PIECE = 8 << 20  # bytes that are mapped at once
_TOUCH = 256 << 10  # bytes that are touched at once: others wait for the memory map meanwhile
_READY = 4  # pieces


class TouchedPiece:
    """Memory that is touched, and of which payloads take parts; what is left is freed with it."""

    def __init__(self) -> None:
        flags, self._left = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0
        address = libc.mmap(None, _PIECE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if address == ctypes.c_void_p(-1).value:
            raise MemoryError("no memory for payloads")
        self._address, self._left = address, _PIECE
        for offset in range(0, _PIECE, _TOUCH):
            if libc.madvise(address + offset, _TOUCH, POPULATE_WRITE):
                raise MemoryError("memory cannot be touched in advance before Linux 5.14")

    def take(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return memory that is freed with the array; None if too little is left."""
        size = -(-nbytes // PAGE) * PAGE
        if size > self._left:
            return None
        memory = (ctypes.c_char * nbytes).from_address(self._address)
        weakref.finalize(memory, libc.munmap, self._address, size).atexit = False
        self._address, self._left = self._address + size, self._left - size
        return np.frombuffer(memoryview(memory), np.uint8)

    def __del__(self) -> None:
        if self._left:
            libc.munmap(self._address, self._left)


class Reserve:
    """Touches memory for the payloads of a history, as long as that grows."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._current: TouchedPiece | None = None
        self._ready: collections.deque[TouchedPiece] = collections.deque()
        self._wanted = threading.Event()
        self._closed = False

    def start(self) -> None:
        """Touch memory from now on, until the reserve is closed."""
        if can_share and self._grows():
            threading.Thread(target=self._run, name="tensortap-reserve", daemon=True).start()

    def close(self) -> None:
        """Release the memory that nobody has taken."""
        self._closed = True
        self._wanted.set()

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory with undefined content, touched if possible; for one thread."""
        found = None
        if not self._grows():
            # a full history gives memory back, which the allocator uses again
            self._current = None
            self._ready.clear()
        elif 64 << 10 <= nbytes <= 2 << 20:  # NumPy uses huge pages for larger ones
            found = self._current.take(nbytes) if self._current is not None else None
            if found is None:
                self._wanted.set()
                self._current = self._ready.popleft() if self._ready else None
                found = self._current.take(nbytes) if self._current is not None else None
        return np.empty(nbytes, np.uint8) if found is None else found

    def _grows(self) -> bool:
        return self._history.nbytes + 4 * _READY * _PIECE < self._history.bound

    def _run(self) -> None:
        try:
            while not self._closed:
                self._wanted.clear()
                while len(self._ready) < _READY and self._grows() and has_room(_PIECE):
                    self._ready.append(TouchedPiece())
                self._wanted.wait()
                time.sleep(0.02)  # what arrives together goes first
        except MemoryError:
            pass
        self._ready.clear()
