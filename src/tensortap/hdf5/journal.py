"""An HDF5 file that stays readable when its writer is killed.

The HDF5 library changes a file at many places, in any order, at any time; a kill in between leaves
a file that cannot be opened. Here the library never overwrites what the last commit has written.
What it writes behind the end of that goes to the file; what it writes before is kept in memory as
changed pages. A commit appends these pages as a journal, announces the journal in the user block at
the front (which HDF5 does not use), and only then writes the pages to their places. A reader that
finds a journal announced reads its pages; a writer finishes the commit.

    0      user block: magic, generation, offset, size and digest of the journal, end
    512    HDF5, as it was at the last commit
    end    nothing, or the journal: for each page its number and its bytes
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from tensortap.errors import TensortapError

USER_BLOCK_SIZE = 512
PAGE = 4096
_MAGIC = b"tensortap-h5\0\0\0\x01"
_LAYOUT = struct.Struct("<16sQQQQ16s")
_NUMBER = struct.Struct("<Q")


class UserBlock(NamedTuple):
    """The first bytes of a file: the number of commits, and the journal if there is one."""

    generation: int
    offset: int = 0
    size: int = 0
    end: int = 0  # size of the file after the commit
    digest: bytes = bytes(16)


def read_user_block(fd: int) -> UserBlock | None:
    """Return the user block of a file, or None if tensortap has not written the file."""
    raw = os.pread(fd, _LAYOUT.size, 0)
    if len(raw) < _LAYOUT.size or not raw.startswith(_MAGIC):
        return None
    return UserBlock(*_LAYOUT.unpack(raw)[1:])


def _read_journal(fd: int, block: UserBlock) -> dict[int, bytearray]:
    """Return the pages of the journal; none if there is no complete journal."""
    raw = os.pread(fd, block.size, block.offset)
    if len(raw) != block.size or xxhash.xxh3_128_digest(raw) != block.digest:
        return {}
    step = _NUMBER.size + PAGE
    return {
        _NUMBER.unpack_from(raw, at)[0]: bytearray(raw[at + _NUMBER.size : at + step])
        for at in range(0, len(raw), step)
    }


def _pages(start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield the pages of a range of bytes: number, slice in the range, slice in the page."""
    for number in range(start // PAGE, math.ceil(stop / PAGE)) if start < stop else ():
        first = number * PAGE
        low, high = max(start, first), min(stop, first + PAGE)
        yield number, slice(low - start, high - start), slice(low - first, high - first)


class JournaledFile:
    """A file object for h5py; only `commit` changes what a reader finds.

    In a forked child it is closed: the library would flush data there that the parent owns, and
    the child would keep the file locked.
    """

    def __init__(self, fd: int, *, writing: bool) -> None:
        self._fd = fd
        self._position = 0
        self._changed: dict[int, bytearray] = {}  # pages that are not yet in their places
        self._ignoring = False
        self._error: Exception | None = None
        size = self._end = os.fstat(fd).st_size
        # pages that the last commit may use; the library may write directly behind them
        self._committed = math.ceil(size / PAGE)
        block = read_user_block(fd)
        self._generation = block.generation if block is not None else 0
        if block is not None and block.size:
            self._changed = _read_journal(fd, block)
            if self._changed:
                self._end = block.end
        if writing:
            if self._changed:
                self._apply()
            _open_files.add(self)

    # -- called by h5py ----------------------------------------------------------------------

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        data = bytearray(max(0, self._end - self._position) if size < 0 else size)
        del data[self.readinto(data) :]
        return bytes(data)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        start, count = self._position, len(view) if self._fd < 0 else 0
        while count < len(view) and (read := os.preadv(self._fd, [view[count:]], start + count)):
            count += read
        view[count:] = bytes(len(view) - count)  # a hole, or pages that are only in memory
        if self._changed:
            for number, within, inside in _pages(start, start + len(view)):
                if number in self._changed:
                    view[within] = self._changed[number][inside]
        size = max(0, min(len(view), self._end - start))
        self._position += size
        return size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        start, size = self._position, len(view)
        self._position += size
        if self._ignoring:
            return size
        before = min(size, max(0, self._committed * PAGE - start))
        try:
            for number, within, inside in _pages(start, start + before):
                if number not in self._changed:
                    page = self._changed[number] = bytearray(PAGE)
                    os.preadv(self._fd, [page], number * PAGE)
                self._changed[number][inside] = view[within]
            _write_all(self._fd, view[before:], start + before)
        except (OSError, MemoryError) as error:
            # not raised here: neither h5py nor the library would survive it
            self._error = error
            self._ignoring = True
        self._end = max(self._end, self._position)
        return size

    def truncate(self, size: int | None = None) -> int:
        self._end = self._position if size is None else size
        return self._end

    def flush(self) -> None:
        """Do nothing: the library flushes at any time, and only `commit` counts."""

    # -- called by the writer ----------------------------------------------------------------

    def check(self) -> None:
        """Raise the error of an earlier write, if there was one."""
        if self._error is not None:
            raise self._error

    def commit(self) -> None:
        """Make everything written since the last commit part of the file, or nothing of it."""
        self.check()
        if self._ignoring:
            return
        self._generation += 1
        raw = b"".join(_NUMBER.pack(n) + page for n, page in sorted(self._changed.items()))
        if raw:
            # behind everything that the last commit or this one uses
            offset = max(self._end, self._committed * PAGE)
            _write_all(self._fd, raw, offset)
            digest = xxhash.xxh3_128_digest(raw)
            self._write_block(UserBlock(self._generation, offset, len(raw), self._end, digest))
        self._apply()

    def _apply(self) -> None:
        for number, page in self._changed.items():
            skip = 0 if number else USER_BLOCK_SIZE  # it announces the journal until all is written
            _write_all(self._fd, memoryview(page)[skip:], number * PAGE + skip)
        self._write_block(UserBlock(self._generation))
        os.ftruncate(self._fd, self._end)
        self._changed = {}
        self._committed = math.ceil(self._end / PAGE)

    def _write_block(self, block: UserBlock) -> None:
        _write_all(self._fd, _LAYOUT.pack(_MAGIC, *block), 0)

    def abandon(self) -> None:
        """Ignore all further writes: the file stays as the last commit has left it."""
        self._ignoring = True
        self._error = None

    def close(self) -> None:
        """Ignore all further writes and close the file."""
        self.abandon()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_open_files: weakref.WeakSet[JournaledFile] = weakref.WeakSet()


def _close_in_child() -> None:
    for file in list(_open_files):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


def _write_all(fd: int, data: Any, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


_WHOLE_FILE = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def lock(fd: int, path: Path) -> None:
    """Keep other writers out, but not readers; raise TensortapError if there is a writer."""
    # not flock, which the HDF5 library of a reader uses
    command = getattr(fcntl, "F_OFD_SETLK", None)
    try:
        if command is None:  # only Linux has locks that survive closing another descriptor
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            fcntl.fcntl(fd, command, _WHOLE_FILE)
    except (BlockingIOError, PermissionError):
        os.close(fd)
        raise TensortapError(
            f"{path} is already being written by this or another program"
        ) from None
    except OSError:
        pass  # a file system without locks
