"""The files of a black box in a run: snapshots of the state, and the steps since each of them.

::

    blackbox/00000/000003.steps           a journal: a snapshot, then the steps from there on
    blackbox/00000/000003.safetensors …   tensors of snapshots, each stored once, by digest

Frames of a journal are the head of the snapshot (``h``), bytes of a tensor (``b``), the beginning
of a step (``s``) and its end (``e``). A payload file is complete before a journal refers to it, and
a journal is deleted before its payloads. So whatever is left after a crash can be read.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from tensortap.buffers import view_of
from tensortap.files import folder_mode
from tensortap.record import Opaque, TensorData, Value
from tensortap.runs.journal import JournalFile, frame_nbytes
from tensortap.runs.layout import rank_name
from tensortap.runs.payloads import TensorFile, TensorReader
from tensortap.stats.digest import digest
from tensortap.values import leaves, map_leaves

VERSION = 1
FOLDER = "blackbox"
HEAD, BYTES, STEP, END = b"h", b"b", b"s", b"e"  # frames of a journal
_SMALL = 256  # bytes of a tensor that is part of the value that it is in
_FILE = 256 << 20  # bytes after which a payload file is closed
_RESERVED = 64 << 10  # bytes of the header of a payload file
_encode = msgspec.msgpack.Encoder().encode


class SegmentHead(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot: its step, its value, where the tensors in it are, and how many steps were lost.

    The key of a tensor in its file is its digest.
    """

    format: int
    step: int
    dropped: int
    value: bytes
    payloads: tuple[tuple[str, str], ...]


class StepHead(msgspec.Struct, frozen=True, array_like=True):
    """A step: its number, its value, and which of the tensors in the journal belong to it.

    `unstored` says why the step cannot be run again, if it cannot.
    """

    number: int
    value: bytes
    tensors: tuple[int, ...]
    unstored: str = ""


def split(value: Value) -> tuple[bytes, list[TensorData]]:
    """Return a value in MessagePack, and the large tensors, to which it refers by index."""
    large: list[TensorData] = []

    def take(leaf: Value) -> Value:
        if not isinstance(leaf, TensorData):
            return leaf
        data = view_of(leaf.data)
        if data.nbytes <= _SMALL:
            return TensorData(leaf.framework, leaf.dtype, leaf.shape, bytes(data))
        large.append(leaf)
        return TensorData(leaf.framework, leaf.dtype, leaf.shape, len(large) - 1)

    return _encode(map_leaves(take, value)), large


def first_opaque(value: Value) -> Opaque | None:
    """Return an object in a value of which a run can hold only type and repr; None without."""
    return next((leaf for _, leaf in leaves(value) if isinstance(leaf, Opaque)), None)


def box_folder(run: Path, rank: int) -> Path:
    """Return the folder with the snapshots and steps of a rank."""
    return run / FOLDER / rank_name(rank)


class _Segment(NamedTuple):
    """A snapshot on disk and the steps after it, as the writer remembers them."""

    journal: Path
    keys: frozenset[str]
    steps: list[int]


class ReplayableWriter:
    """Writes snapshots and steps; evicts the oldest so that all take at most `limit` bytes."""

    def __init__(self, run: Path, rank: int, limit: int, *, durable: bool = False) -> None:
        self.folder = box_folder(run, rank)
        self.folder.mkdir(mode=folder_mode(), parents=True, exist_ok=True)
        self.limit = limit
        self.evicted = 0  # steps
        self._durable = durable
        self._segments: collections.deque[_Segment] = collections.deque()
        self._journal: JournalFile | None = None
        self._files: dict[Path, set[str]] = {}  # the keys in each payload file
        self._places: dict[str, Path] = {}  # key → payload file
        self._sizes: dict[Path, int] = {}
        self._in_journal: dict[bytes, int] = {}  # digest → index of a tensor in the journal
        self._number = self._file_number = 0

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(self._sizes.values())

    def begin(self, step: int, value: Value, dropped: int) -> bool:
        """Write a snapshot, from which the next steps start; return False if it is too large."""
        self.end()
        cell, large = split(value)
        keys = [digest(tensor).hex() for tensor in large]
        new = {k: t for k, t in zip(keys, large, strict=True) if k not in self._places}
        files = 1 + len(new) // 200
        need = sum(view_of(t.data).nbytes + 64 for t in new.values()) + files * _RESERVED
        if not self._make_room(need + len(cell) + 100 * len(keys), keys):
            return False
        self._store(new)
        places = tuple((self._places[key].name, key) for key in keys)
        head = _encode(SegmentHead(VERSION, step, dropped, cell, places))
        self._journal = JournalFile(self.folder / f"{self._number:06d}.steps")
        self._in_journal = {}
        self._number += 1
        self._segments.append(_Segment(self._journal.path, frozenset(keys), []))
        self._append(HEAD, head)
        return True

    def add_step(self, number: int, value: Value) -> bool:
        """Write what is needed to run a step again; return False if there is no room for it."""
        if self._journal is None:
            return False
        opaque = first_opaque(value)
        unstored = f"a {opaque.type} cannot be stored" if opaque is not None else ""
        cell, large = (b"", []) if unstored else split(value)
        marks = [digest(tensor) for tensor in large]
        new = {m: t for m, t in zip(marks, large, strict=True) if m not in self._in_journal}
        need = sum(frame_nbytes(view_of(t.data)) for t in new.values()) + len(cell) + 100
        if not self._make_room(need + 9 * len(large), ()):
            return False
        for mark, tensor in new.items():
            self._append(BYTES, view_of(tensor.data))
            self._in_journal[mark] = len(self._in_journal)
        indices = tuple(self._in_journal[mark] for mark in marks)
        self._append(STEP, _encode(StepHead(number, cell, indices, unstored)))
        self._segments[-1].steps.append(number)
        return True

    def end_step(self, result: bytes) -> None:
        """Write the digest of what the last step returned."""
        if self._journal is not None:
            self._append(END, result)

    def end(self) -> None:
        """Close the journal; steps need another snapshot from here on."""
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close(durable=self._durable)

    def _append(self, kind: bytes, data: bytes | memoryview) -> None:
        assert self._journal is not None
        self._journal.append(kind, data)
        self._sizes[self._journal.path] = self._journal.nbytes

    def _store(self, tensors: dict[str, TensorData]) -> None:
        """Write tensors into payload files."""
        file: TensorFile | None = None
        keys: list[str] = []
        try:
            for key, tensor in tensors.items():
                if file is None or file.nbytes >= _FILE or not file.fits(key):
                    self._close(file, keys)
                    file = TensorFile(self.folder / f"{self._file_number:06d}.safetensors")
                    self._file_number += 1
                    keys = []
                file.add(key, tensor.dtype, tensor.shape, view_of(tensor.data))
                keys.append(key)
            self._close(file, keys)
        except OSError:
            if file is not None:
                file.discard()
            raise

    def _close(self, file: TensorFile | None, keys: list[str]) -> None:
        if file is None:
            return
        file.close(durable=self._durable)
        self._files[file.path] = set(keys)
        self._places.update(dict.fromkeys(keys, file.path))
        self._sizes[file.path] = file.path.stat().st_size

    # -- eviction ---------------------------------------------------------------------------------

    def _make_room(self, nbytes: int, needed: Iterable[str]) -> bool:
        """Evict the oldest snapshots until there is room; keep the tensors that are `needed`."""
        own = 1 if self._journal is not None else 0
        while self.nbytes + nbytes > self.limit and len(self._segments) > own:
            self._evict(set(needed))
        return self.nbytes + nbytes <= self.limit

    def _evict(self, needed: set[str]) -> None:
        oldest = self._segments.popleft()
        oldest.journal.unlink(missing_ok=True)
        self._sizes.pop(oldest.journal, None)
        self.evicted += len(oldest.steps)
        live = needed.union(*(segment.keys for segment in self._segments))
        for path in {self._places[key] for key in oldest.keys}:
            keys = self._files[path]
            dead = keys - live
            keys -= dead
            for key in dead:
                del self._places[key]
            if not keys:
                path.unlink(missing_ok=True)
                del self._files[path], self._sizes[path]
            elif dead:
                _rewrite(path, keys)
                self._sizes[path] = path.stat().st_size


def _rewrite(path: Path, keys: Iterable[str]) -> None:
    """Replace a payload file by one with some of its tensors only."""
    tensors = TensorReader(path).tensors()
    file = TensorFile(path)  # a draft beside it until it is complete
    for key in keys:
        file.add(key, tensors[key].dtype, tensors[key].shape, view_of(tensors[key].data))
    file.close()
