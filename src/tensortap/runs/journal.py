"""A file that grows by frames and stays readable whenever its writer is killed.

A frame is a letter, the length of its content in eight bytes, the XXH3-64 of its content in eight
bytes, and the content. A reader uses the complete frames and ignores the rest.
"""

from __future__ import annotations

import os
import struct
import weakref
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_digest

from tensortap.files import CorruptFile, file_mode, open_regular
from tensortap.runs.payloads import write_all

_HEAD = struct.Struct("<cQ8s")


class Frame(NamedTuple):
    """Position of the content of a frame in its file."""

    kind: bytes
    start: int
    nbytes: int
    check: bytes


def frame_nbytes(data: bytes | memoryview) -> int:
    """Return how many bytes of a file the frame of some content takes."""
    return _HEAD.size + len(data)


class JournalFile:
    """A journal that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file_mode())
        self.nbytes = 0

    def append(self, kind: bytes, data: bytes | memoryview) -> None:
        """Append a frame; if this raises, the next one takes its place."""
        head = _HEAD.pack(kind, len(data), xxh3_64_digest(data))
        position = write_all(self._fd, head, self.nbytes)
        self.nbytes = write_all(self._fd, data, position)

    def close(self, *, durable: bool = False) -> None:
        """Close the file, without what was left of a frame that did not fit."""
        os.ftruncate(self._fd, self.nbytes)
        if durable:
            os.fsync(self._fd)
        os.close(self._fd)


class JournalReader:
    """The complete frames of a journal; their content is read when it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as stream:
            self._fd = os.dup(stream.fileno())
        weakref.finalize(self, os.close, self._fd)
        self._size = os.fstat(self._fd).st_size

    def frames(self, position: int = 0) -> list[Frame]:
        """Return all complete frames."""
        found: list[Frame] = []
        while (frame := self.frame_at(position)) is not None:
            found.append(frame)
            position = frame.start + frame.nbytes
        return found

    def frame_at(self, position: int) -> Frame | None:
        """Return the frame at a position; None if it is not complete."""
        head = os.pread(self._fd, _HEAD.size, position)
        if len(head) < _HEAD.size:
            return None
        kind, nbytes, check = _HEAD.unpack(head)
        start = position + _HEAD.size
        return Frame(kind, start, nbytes, check) if nbytes <= self._size - start else None

    def read(self, frame: Frame) -> bytes:
        """Return the content of a frame; raise CorruptFile if it is not what was written."""
        data = bytearray()
        while part := os.pread(self._fd, frame.nbytes - len(data), frame.start + len(data)):
            data += part
        if len(data) < frame.nbytes or xxh3_64_digest(data) != frame.check:
            raise CorruptFile(f"{self.path} is damaged at byte {frame.start:,}")
        return bytes(data)
