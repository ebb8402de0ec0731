"""Payload files in the safetensors layout, written straight from the buffers.

The layout: eight bytes with the length of a JSON header, the header (padded with spaces), then the
bytes of the tensors. Here the header is left open at the front and filled in when the file is
complete; only then does the file get its name, so whoever sees a file sees all of it.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from pathlib import Path
from typing import Any

from tensortap.dtypes import itemsize
from tensortap.errors import TensortapError
from tensortap.record import TensorData

_HEADER = 64 << 10  # room for the header: some hundred tensors a file
_LENGTH = 8

# what safetensors calls our dtypes; one that it has not is stored as bytes, its name in the row
_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16",
    "int32": "I32", "uint32": "U32", "int64": "I64", "uint64": "U64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip

_DTYPES = {
    **{theirs: ours for ours, theirs in _NAMES.items()},
    "F8_E8M0": "float8_e8m0fnu",
}


class TensorFile:
    """A payload file in the making."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._draft = path.with_name(path.name + ".part")
        self._fd = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._entries: dict[str, Any] = {}
        self._entry_nbytes = 64
        self.nbytes = 0

    def fits(self, key: str) -> bool:
        """Whether the header has room for one more tensor."""
        return self._entry_nbytes + len(json.dumps(key)) + 200 < _HEADER

    def add(self, key: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Append a tensor; an error leaves the file as it was before."""
        start, view = self.nbytes, data.cast("B") if data.nbytes else data
        position = _LENGTH + _HEADER + start
        while view.nbytes:
            written = os.pwrite(self._fd, view, position)
            position += written
            view = view[written:]
        known = _NAMES.get(dtype)
        entry = {
            "dtype": known or "U8",
            "shape": list(shape) if known else [data.nbytes],
            "data_offsets": [start, start + data.nbytes],
        }
        self._entries[key] = entry
        self._entry_nbytes += len(json.dumps({key: entry})) + 2
        # every tensor begins on a boundary that any dtype can be read from in place
        self.nbytes = start + data.nbytes
        if padding := -self.nbytes % 64:
            self._pad(padding)

    def _pad(self, nbytes: int) -> None:
        # safetensors wants no holes: what fills them up is a tensor of its own
        start = self.nbytes
        self._entries[f"__pad_{start}__"] = {
            "dtype": "U8", "shape": [nbytes], "data_offsets": [start, start + nbytes],
        }  # fmt: skip
        self._entry_nbytes += 110
        os.pwrite(self._fd, bytes(nbytes), _LENGTH + _HEADER + start)
        self.nbytes += nbytes

    def close(self, *, durable: bool = False) -> None:
        """Fill in the header and give the file its name."""
        header = json.dumps(self._entries, ensure_ascii=True).encode()
        header = header.ljust(_HEADER)
        os.pwrite(self._fd, len(header).to_bytes(_LENGTH, "little") + header, 0)
        if durable:
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        os.rename(self._draft, self.path)
        if durable:
            sync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove the draft."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._draft.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make names in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class CorruptFile(TensortapError):
    """A payload file that is not what it should be."""


class TensorReader:
    """A payload file, mapped."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                length = int.from_bytes(stream.read(_LENGTH), "little")
                if size < _LENGTH or length > size - _LENGTH:
                    raise CorruptFile(f"{path} is cut short: its header is not whole")
                entries = json.loads(stream.read(length))
                self.memory = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CorruptFile(f"{path} is missing: the run was copied without it") from None
        except ValueError as error:
            raise CorruptFile(f"{path} is no safetensors file: {error}") from None
        if not isinstance(entries, dict):
            raise CorruptFile(f"{path} is no safetensors file: its header is no object")
        self.path = path
        self._start = _LENGTH + length
        self._entries = entries

    def view(self, key: str) -> memoryview:
        """The bytes of a tensor, as they lie in the file."""
        try:
            begin, end = self._entries[key]["data_offsets"]
            if not (isinstance(begin, int) and isinstance(end, int)):
                raise TypeError
        except (KeyError, TypeError, ValueError):
            raise CorruptFile(f"{self.path} has no tensor {key!r}") from None
        start, limit = self._start, len(self.memory)
        if not 0 <= begin <= end <= limit - start:
            raise CorruptFile(f"{self.path} is cut short: {key!r} is not whole")
        return memoryview(self.memory)[start + begin : start + end]

    def tensors(self) -> dict[str, TensorData]:
        """All tensors of the file, over its mapped bytes; what only fills holes is left out."""
        found = {}
        for key, entry in self._entries.items():
            if key == "__metadata__" or key.startswith("__pad_"):
                continue
            data = self.view(key)
            name, shape = entry.get("dtype"), entry.get("shape")
            dtype = _DTYPES.get(name)
            if dtype is None:
                raise CorruptFile(f"{self.path}: {key!r} has the dtype {str(name)[:40]}, not known")
            if not isinstance(shape, list) or not all(
                isinstance(size, int) and 0 <= size < 1 << 63 for size in shape
            ):
                raise CorruptFile(f"{self.path}: {key!r} has no shape")
            if math.prod(shape) * itemsize(dtype) != data.nbytes:
                raise CorruptFile(
                    f"{self.path}: {key!r} is a {dtype} of shape {shape} in {data.nbytes} bytes"
                )
            found[key] = TensorData("numpy", dtype, tuple(shape), data)
        return found
