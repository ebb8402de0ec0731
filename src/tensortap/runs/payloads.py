"""Payload files in the safetensors format, written directly from the buffers.

A file starts with the length of a JSON header in eight bytes, then the header (padded with
spaces), then the bytes of the tensors. The writer reserves the header, fills it in when the file
is complete, and only then gives the file its name: a file that exists is complete.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tensortap.core.dtypes import DTYPES, tensor_nbytes
from tensortap.core.files import CorruptFile, contained, file_mode, open_regular, plain
from tensortap.core.limits import format_size

_LENGTH = 8  # bytes of the header's length
# Bytes reserved for the header: enough for some hundred tensors, and tensors begin at a multiple of
# 64. Files are copied several times as slowly where memory and file are aligned differently.
_HEADER = (64 << 10) - _LENGTH
_LARGEST_HEADER = 16 << 20  # bytes: a hundred thousand tensors; in memory up to 25 times as much
_OPEN_FILES = 64

DTYPE_NAMES = {row.safetensors: row.name for row in DTYPES.values() if row.safetensors}

# Dtypes that safetensors lacks are stored as bytes, with their name in the row of the table. So is
# F8_E8M0, which older releases of safetensors cannot read.
_NAMES = {name: spelling for spelling, name in DTYPE_NAMES.items() if spelling != "F8_E8M0"}


def has_nbytes(dtype: str, shape: Sequence[int], nbytes: int) -> bool:
    """Return whether a tensor of this dtype and shape has so many bytes; the shape may be hostile.

    >>> has_nbytes("bfloat16", (2, 3), 12), has_nbytes("int8", (-1,), 1)
    (True, False)
    """
    try:
        return len(shape) <= 64 and tensor_nbytes(dtype, shape) == nbytes
    except (TypeError, ValueError):
        return False


class TensorFile:
    """A payload file that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._draft = path.with_name(path.name + ".part")
        self._fd = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file_mode())
        self._entries: dict[str, Any] = {}
        self._entry_nbytes = 64
        self.nbytes = 0
        try:  # now: the header of a file on a full disk needs its place
            write_all(self._fd, bytes(_LENGTH + _HEADER), 0)
        except OSError:
            self.discard()
            raise

    def fits(self, key: str) -> bool:
        """Return whether the header has room for one more tensor."""
        return self._entry_nbytes + len(json.dumps(key)) + 200 < _HEADER

    def add(self, key: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Append a tensor; if this raises, the file stays as it was before."""
        start = self.nbytes
        write_all(self._fd, data, _LENGTH + _HEADER + start)
        known = _NAMES.get(dtype)
        entry = {
            "dtype": known or "U8",
            "shape": list(shape) if known else [data.nbytes],
            "data_offsets": [start, start + data.nbytes],
        }
        self._entries[key] = entry
        self._entry_nbytes += len(json.dumps({key: entry})) + 2
        # every tensor starts at a multiple of 64 bytes, so that it can be used in place
        self.nbytes = start + data.nbytes
        if padding := -self.nbytes % 64:
            self._pad(padding)

    def _pad(self, nbytes: int) -> None:
        # safetensors allows no holes: padding is a tensor of its own
        start = self.nbytes
        self._entries[f"__pad_{start}__"] = {
            "dtype": "U8", "shape": [nbytes], "data_offsets": [start, start + nbytes],
        }  # fmt: skip
        self._entry_nbytes += 110
        os.pwrite(self._fd, bytes(nbytes), _LENGTH + _HEADER + start)
        self.nbytes += nbytes

    def close(self, *, durable: bool = False) -> None:
        """Write the header and give the file its name."""
        header = json.dumps(self._entries, ensure_ascii=True).encode()
        header = header.ljust(_HEADER)
        os.ftruncate(self._fd, _LENGTH + _HEADER + self.nbytes)  # after a tensor that did not fit
        write_all(self._fd, len(header).to_bytes(_LENGTH, "little") + header, 0)
        if durable:
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        os.rename(self._draft, self.path)
        if durable:
            sync_folder(self.path.parent)

    def discard(self, *, remove: bool = True) -> None:
        """Close and remove the file, which nothing refers to."""
        os.close(self._fd)
        self._fd = -1
        if remove:
            self._draft.unlink(missing_ok=True)


def write_all(fd: int, data: Any, position: int) -> int:
    """Write all bytes at a position; return the position after them."""
    view = memoryview(data)
    view = view.cast("B") if view.nbytes else view
    while view.nbytes:
        written = os.pwrite(fd, view, position)
        position += written
        view = view[written:]
    return position


def sync_folder(folder: Path) -> None:
    """Make the names of files in a folder survive a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _buffer(nbytes: int, start: int) -> Any:
    """Return memory for a payload at this position in a file, aligned as it is there."""
    import numpy as np

    memory = np.empty(nbytes + 64, np.uint8)  # large memory comes as few large pages
    lead = (start - memory.ctypes.data) % 64
    return memory[lead : lead + nbytes]


class FilePayload:
    """Bytes in a file, which are read when they are used: a mapping would die with the file."""

    def __init__(self, file: TensorReader, start: int, nbytes: int) -> None:
        self._file = file
        self._start = start
        self.nbytes = nbytes

    @property
    def view(self) -> memoryview:
        """The bytes, read-only."""
        try:
            data = _buffer(self.nbytes, self._start)
        except MemoryError:
            size, path = format_size(self.nbytes), self._file.path
            raise CorruptFile(f"{path}: a tensor of {size} does not fit in memory") from None
        rest, start = memoryview(data), self._start
        while rest.nbytes:
            count = os.preadv(self._file.fd, [rest], start)
            if not count:
                raise CorruptFile(f"{self._file.path} is truncated: it has become shorter")
            rest, start = rest[count:], start + count
        return memoryview(data).toreadonly()


class TensorReader:
    """A safetensors file, whose tensors are read when they are used."""

    def __init__(self, path: Path) -> None:
        try:
            with open_regular(path) as stream:
                self._size = os.fstat(stream.fileno()).st_size
                length = int.from_bytes(stream.read(_LENGTH), "little")
                if self._size < _LENGTH or length > self._size - _LENGTH:
                    raise CorruptFile(f"{path} is truncated: its header is incomplete")
                if length > _LARGEST_HEADER:
                    raise CorruptFile(f"{path} is not a safetensors file: its header is too large")
                entries = json.loads(stream.read(length))
                self.fd = os.dup(stream.fileno())
                weakref.finalize(self, os.close, self.fd)
        except FileNotFoundError:
            raise CorruptFile(f"{path} is missing: the run was copied without it") from None
        except (ValueError, RecursionError) as error:
            raise CorruptFile(f"{path} is not a safetensors file: {plain(str(error))}") from None
        if not isinstance(entries, dict):
            raise CorruptFile(f"{path} is not a safetensors file: its header is not an object")
        self.path = path
        self._start = _LENGTH + length
        self.entries = entries

    def payload(self, key: str) -> FilePayload:
        """Return the bytes of a tensor, as they are in the file."""
        try:
            begin, end = self.entries[key]["data_offsets"]
            if not (isinstance(begin, int) and isinstance(end, int)):
                raise TypeError
        except (KeyError, TypeError, ValueError):
            raise CorruptFile(f"{self.path} has no tensor {plain(repr(key))}") from None
        if not 0 <= begin <= end <= self._size - self._start:
            raise CorruptFile(f"{self.path} is truncated: {plain(repr(key))} is incomplete")
        return FilePayload(self, self._start + begin, end - begin)


class PayloadFiles:
    """The payload files of a run; the files used last stay open.

    `fetch` is called with the path of a file in the run before it is opened.
    """

    def __init__(self, run: Path, fetch: Callable[[str], None] | None = None) -> None:
        self._run = run
        self._fetch = fetch
        self._files: dict[str, TensorReader] = {}

    def view(self, file: str, key: str) -> memoryview:
        """Return the bytes of one payload."""
        if not isinstance(file, str):
            raise CorruptFile(f"{self._run} refers to a payload without a file")
        reader = self._files.get(file)
        if reader is None:
            path = contained(self._run, f"tensors/{file}")
            if self._fetch is not None:
                self._fetch(f"tensors/{file}")
            if len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files)))
            reader = self._files[file] = TensorReader(path)
        return reader.payload(key).view
