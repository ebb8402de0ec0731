"""An HDF5 file that a killed process leaves whole.

The HDF5 library changes the inside of a file at many places, in any order, at any time; killed in
between, it leaves a file that nobody can open. Here the library never touches what the last
commit has made: what it writes behind the end of that goes to the file, what it writes before it
is held in memory. A commit puts those pages behind the end as well, says so in the user block in
front (which HDF5 leaves to us), and only then writes them to their places. Whoever finds the user
block saying so finishes the work, or reads as if it were finished.

    0      the user block: magic, generation, offset, size and digest of a journal, end
    512    HDF5, as it was at the last commit
    end    nothing, or the journal: for each page its number and its bytes
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import weakref
from pathlib import Path
from typing import Any

import xxhash

from tensortap.errors import TensortapError

USER_BLOCK = 512
PAGE = 4096
_MAGIC = b"tensortap-h5\0\0\0\x01"
_MARK = struct.Struct("<16sQQQQ16s")  # magic, generation, offset, size, end, digest
_NUMBER = struct.Struct("<Q")
_SEEK_END = 2


class Mark:
    """What the user block says: how often was committed, and where a journal lies if one does."""

    __slots__ = ("digest", "end", "generation", "offset", "size")

    def __init__(
        self, generation: int, offset: int = 0, size: int = 0, end: int = 0, digest: bytes = b""
    ) -> None:
        self.generation = generation
        self.offset = offset
        self.size = size
        self.end = end
        self.digest = digest

    def packed(self) -> bytes:
        return _MARK.pack(
            _MAGIC, self.generation, self.offset, self.size, self.end, self.digest or bytes(16)
        )


def read_mark(fd: int) -> Mark | None:
    """What the user block of a file says; None if tensortap has not written the file."""
    raw = os.pread(fd, _MARK.size, 0)
    if len(raw) < _MARK.size or not raw.startswith(_MAGIC):
        return None
    _, generation, offset, size, end, digest = _MARK.unpack(raw)
    return Mark(generation, offset, size, end, digest)


def _journal(fd: int, mark: Mark) -> dict[int, bytearray] | None:
    """The pages of a journal that is complete; None if there is none."""
    if not mark.size:
        return None
    raw = os.pread(fd, mark.size, mark.offset)
    if len(raw) != mark.size or xxhash.xxh3_128_digest(raw) != mark.digest:
        return None
    step = _NUMBER.size + PAGE
    return {
        _NUMBER.unpack_from(raw, at)[0]: bytearray(raw[at + _NUMBER.size : at + step])
        for at in range(0, len(raw), step)
    }


class WholeFile:
    """What h5py takes for a Python file; only `commit` changes what a reader finds.

    In a process that was forked from the one that opened it, it is dead: the library would flush
    what both believe to own, and the file would stay locked as long as the child lives.
    """

    def __init__(self, fd: int, *, writing: bool) -> None:
        self._fd = fd
        self._at = 0
        self._held: dict[int, bytearray] = {}
        self._dead = False
        self._failed: Exception | None = None
        mark = read_mark(fd)
        self._generation = mark.generation if mark is not None else 0
        pages = _journal(fd, mark) if mark is not None else None
        self._end = os.fstat(fd).st_size
        if mark is not None and pages is not None:
            self._held = pages
            self._end = mark.end
        # pages that the last commit may have used; what lies behind them is free to be written
        self._kept = math.ceil(os.fstat(fd).st_size / PAGE)
        if writing:
            if pages is not None:
                self._apply()
            _open.add(self)

    # what h5py calls

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (self._end if whence == _SEEK_END else self._at if whence else 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        found = bytearray(max(0, self._end - self._at) if size < 0 else size)
        del found[self.readinto(found) :]
        return bytes(found)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        got = len(view) if self._fd < 0 else 0
        while got < len(view):
            read = os.preadv(self._fd, [view[got:]], self._at + got)
            if not read:
                break
            got += read
        view[got:] = bytes(len(view) - got)  # held in memory only, or a hole: zeros till patched
        if self._held:
            self._patch(view)
        count = max(0, min(len(view), self._end - self._at))
        self._at += count
        return count

    def _patch(self, view: memoryview) -> None:
        start, stop = self._at, self._at + len(view)
        for number in range(start // PAGE, math.ceil(stop / PAGE)):
            page = self._held.get(number)
            if page is not None:
                low, high = max(start, number * PAGE), min(stop, (number + 1) * PAGE)
                view[low - start : high - start] = memoryview(page)[
                    low - number * PAGE : high - number * PAGE
                ]

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        if self._dead:
            self._at += size
            return size
        kept = min(size, max(0, self._kept * PAGE - self._at))
        try:
            if kept:
                self._hold(view[:kept])
            _write_all(self._fd, view[kept:], self._at + kept)
        except (OSError, MemoryError) as error:
            # not raised here: neither h5py nor the library would survive it
            self._failed = error
            self._dead = True
        self._at += size
        self._end = max(self._end, self._at)
        return size

    def _hold(self, view: memoryview) -> None:
        start, stop = self._at, self._at + len(view)
        for number in range(start // PAGE, math.ceil(stop / PAGE)):
            page = self._held.get(number)
            if page is None:
                page = self._held[number] = bytearray(PAGE)
                os.preadv(self._fd, [page], number * PAGE)
            low, high = max(start, number * PAGE), min(stop, (number + 1) * PAGE)
            page[low - number * PAGE : high - number * PAGE] = view[low - start : high - start]

    def truncate(self, size: int | None = None) -> int:
        self._end = self._at if size is None else size
        return self._end

    def flush(self) -> None:
        """Nothing: the library flushes when it likes, and only a commit is one."""

    # what the writer calls

    def check(self) -> None:
        """Raise what kept a write from being done, if something did."""
        if self._failed is not None:
            raise self._failed

    def commit(self) -> None:
        """Make all that was written since the last commit part of the file, or none of it."""
        self.check()
        if self._dead:
            return
        self._generation += 1
        raw = b"".join(_NUMBER.pack(n) + page for n, page in sorted(self._held.items()))
        if raw:
            # behind what the last commit uses and behind what this one does
            offset = max(self._end, self._kept * PAGE)
            _write_all(self._fd, raw, offset)
            digest = xxhash.xxh3_128_digest(raw)
            self._say(Mark(self._generation, offset, len(raw), self._end, digest))
        self._apply()

    def _apply(self) -> None:
        for number, page in self._held.items():
            skip = 0 if number else USER_BLOCK  # what it says must hold until all is written
            _write_all(self._fd, memoryview(page)[skip:], number * PAGE + skip)
        self._say(Mark(self._generation))
        os.ftruncate(self._fd, self._end)
        self._held = {}
        self._kept = math.ceil(self._end / PAGE)

    def _say(self, mark: Mark) -> None:
        _write_all(self._fd, mark.packed(), 0)

    def abandon(self) -> None:
        """Take nothing more: the file stays as the last commit has left it."""
        self._dead = True
        self._failed = None

    def close(self) -> None:
        """Take nothing more, and give up the file."""
        self.abandon()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_open: weakref.WeakSet[WholeFile] = weakref.WeakSet()


def _in_a_child() -> None:
    for file in list(_open):
        file.close()


os.register_at_fork(after_in_child=_in_a_child)


def _write_all(fd: int, data: Any, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


_WHOLE = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def lock(fd: int, path: Path) -> None:
    """Be the only one who writes the file; readers are not kept out."""
    # not flock: that is what the HDF5 library of a reader asks for
    command = getattr(fcntl, "F_OFD_SETLK", None)
    try:
        if command is None:  # Linux alone has locks that outlive the closing of another descriptor
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            fcntl.fcntl(fd, command, _WHOLE)
    except (BlockingIOError, PermissionError):
        os.close(fd)
        raise TensortapError(
            f"{path} is being written already, by this program or another"
        ) from None
    except OSError:
        pass  # a file system without locks
