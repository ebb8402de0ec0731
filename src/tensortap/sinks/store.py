"""Records into a run on disk.

A row is written after its payload, and a payload file gets its name when it is complete: whoever
opens the run, now or after a crash, sees a consistent prefix.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from tensortap import frameworks as arrays
from tensortap.buffers import view_of
from tensortap.pipeline.ledger import Entry, Ledger
from tensortap.pipeline.sink import Sink, Wake
from tensortap.pipeline.ticket import settle
from tensortap.record import Kind, Record, TensorData
from tensortap.runs import layout, rows, tables
from tensortap.runs.payloads import TensorFile
from tensortap.runs.rows import Payload, Row
from tensortap.values import tensors as tensors_in

log = logging.getLogger("tensortap")

_FILE = 64 << 20  # a payload file is closed here
_TAIL_ROWS = 64 << 10  # the open end is sealed here
_TAIL_BYTES = 32 << 20
_ROWS = 8192  # rows are written together
_AGE = 0.25  # seconds after which what was written becomes visible
_RETRY = 1.0  # seconds between two tries on a full disk
_REMEMBERED = 256  # payloads of a name among which an equal one is looked for


class StoreSink(Sink):
    """The drain that writes one rank's part of a run."""

    pending = 0

    def __init__(
        self, run: Path, rank: int, *, durable: bool = False, ledger: Ledger | None = None
    ) -> None:
        self.ledger = ledger or Ledger()
        self.run = run
        self.rank = rank
        self.durable = durable
        self.failing = ""  # why nothing can be written at the moment
        self._records = layout.records_folder(run, rank)
        self._tensors = layout.tensors_folder(run, rank)
        self._records.mkdir(parents=True, exist_ok=True)
        self._tensors.mkdir(parents=True, exist_ok=True)
        self._schema = rows.schema()
        tables.prepare_to_seal()
        self._file: TensorFile | None = None
        self._files = self._count(self._tensors, "*.safetensors")
        self._part = self._count(self._records, "*.parquet")
        self._rows: list[Row] = []  # not yet in the tail
        self._entries: list[Entry] = []  # whose rows these are
        self._since = time.monotonic()
        self._retry_at = 0.0
        self._waiting: collections.deque[Entry] = collections.deque()
        self._missing: collections.deque[Row] = collections.deque()
        self._known: dict[str, collections.OrderedDict[bytes, Payload]] = {}
        self._tail = self._open_tail()

    @staticmethod
    def _count(folder: Path, pattern: str) -> int:
        numbers = [int(path.name.partition(".")[0]) for path in folder.glob(pattern)]
        return max(numbers, default=-1) + 1

    # -- what the background queue asks --------------------------------------------------

    def room(self) -> int:
        return 0 if self.failing else 1 << 62

    def send(self, entries: list[Entry]) -> None:
        self._waiting.extend(entries)
        self.pending += sum([nbytes for _, _, nbytes in entries])
        self._work()

    def wait(self, wake: Wake, timeout: float) -> None:
        due = self._since + _AGE if self._rows or self._file or self._missing else None
        now = time.monotonic()
        if due is not None and not self.failing:
            timeout = min(timeout, max(0.0, due - now))
        if self.failing:
            timeout = min(timeout, max(0.0, self._retry_at - now))
        wake.wait(timeout)
        now = time.monotonic()
        if self.failing and now >= self._retry_at:
            self._work()
        if not self.failing and due is not None and now >= due:
            self._guarded(self._commit)

    def hurry(self) -> None:
        if not self.failing:
            self._guarded(self._commit)

    def give_up(self) -> list[Entry]:
        lost = [*self._entries, *self._waiting]
        self._entries, self._rows = [], []
        self._waiting.clear()
        self.pending = 0
        return lost

    def close(self) -> None:
        self._work()
        self._guarded(self._commit)
        self._guarded(self._seal)
        self._tail.close()

    def note_dropped(self, name: str, kind: Kind, step: int, rank: int) -> None:
        """A record that found no room: the run says that it is missing. Called while training."""
        gone = Record(name, kind, step, 0, -1, rank, 1, time.time_ns())
        self._missing.append(rows.row_of(gone, None, [], missing=True))

    # -- writing -------------------------------------------------------------------------

    def _guarded(self, work: Any) -> bool:
        """Do it; a disk that is full is said once, and tried again later."""
        try:
            work()
        except OSError as error:
            self._retry_at = time.monotonic() + _RETRY
            if not self.failing:
                self.failing = os.strerror(error.errno) if error.errno else str(error)
                log.warning("tensortap: cannot write to %s: %s; trying on", self.run, error)
            return False
        if self.failing:
            self.failing = ""
            log.warning("tensortap: writing to %s again", self.run)
        return True

    def _work(self) -> None:
        while self._waiting:
            if not self._guarded(self._take_one):
                return
            if len(self._rows) >= _ROWS and not self._guarded(self._commit):
                return

    def _take_one(self) -> None:
        entry = self._waiting[0]
        record = entry[0]
        value = rows.encode_inline(record.value)
        if value is not None:
            self._rows.append(rows.row_of(record, value, []))
        else:
            self._take_large(record)
        self._entries.append(entry)
        self._waiting.popleft()

    def _take_large(self, record: Record) -> None:
        """A record with payloads of its own."""
        blocks: list[Any] = []

        def external(block: Any) -> int:
            blocks.append(block)
            return len(blocks) - 1

        value = rows.encode_value(record.value, external)
        tensors = [t for t in tensors_in(record.value) if type(t.data) is not bytes]
        digests = [arrays.digest(tensor) for tensor in tensors]
        payloads = [
            self._store(record, i, tensor, digest)
            for i, (tensor, digest) in enumerate(zip(tensors, digests, strict=True))
        ]
        if record.digest is None and record.value is tensors[0]:
            record = msgspec.structs.replace(record, digest=digests[0])
        self._rows.append(rows.row_of(record, value, payloads))

    def _store(self, record: Record, index: int, tensor: TensorData, digest: bytes) -> Payload:
        """Write a payload, unless an equal one of its name is there already."""
        known = self._known.setdefault(record.name, collections.OrderedDict())
        found = known.get(digest)
        if found is not None:
            known.move_to_end(digest)
            return found
        key = f"{record.name}@{record.step}:{record.seq}" + (f".{index}" if index else "")
        if self._file is not None and (self._file.nbytes >= _FILE or not self._file.fits(key)):
            self._commit()
        if self._file is None:
            name = f"{self._files:06d}.safetensors"
            self._file = TensorFile(self._tensors / name)
        file = self._file
        file.add(key, tensor.dtype, tensor.shape, view_of(tensor.data))
        payload = known[digest] = Payload(f"{layout.rank_name(self.rank)}/{file.path.name}", key)
        if len(known) > _REMEMBERED:
            known.popitem(last=False)
        return payload

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close(durable=self.durable)
            self._file = None
            self._files += 1

    def _commit(self) -> None:
        """Close the payload file and write the rows that refer to it."""
        self._close_file()
        self._write_rows()

    def _write_rows(self) -> None:
        while self._missing:
            self._rows.append(self._missing.popleft())
        self._since = time.monotonic()
        if not self._rows:
            return
        batch = rows.batch_of(self._rows, self._schema).serialize()
        self._tail.append(batch, durable=self.durable)
        self._tail_rows += len(self._rows)
        done, self._entries, self._rows = self._entries, [], []
        self.pending -= sum([nbytes for _, _, nbytes in done])
        settle(done, True)
        if self._tail_rows >= _TAIL_ROWS or self._tail.nbytes >= _TAIL_BYTES:
            self._seal()

    def _open_tail(self) -> Tail:
        columns = self._schema.with_metadata(tables.metadata(self._part))
        self._tail_rows = 0
        return Tail(self._records / layout.TAIL, columns.serialize())

    def _seal(self) -> None:
        """Turn the open end into a Parquet file, which the next open end replaces."""
        if not self._tail_rows:
            return
        path = self._records / layout.part_name(self._part)
        tables.seal(self._records / layout.TAIL, path, self._part, durable=self.durable)
        self._part += 1
        self._tail.close()
        self._tail = self._open_tail()


class Tail:
    """The open end of a table: a stream of Arrow, to which batches are appended whole."""

    def __init__(self, path: Path, schema: Any) -> None:
        draft = path.with_name(path.name + ".part")
        self._fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self.nbytes = 0
        self.append(schema)
        draft.rename(path)

    def append(self, message: Any, *, durable: bool = False) -> None:
        """Append a message; when the disk is full, nothing of it stays."""
        view, position = memoryview(message).cast("B"), self.nbytes
        try:
            while view.nbytes:
                written = os.pwrite(self._fd, view, position)
                position += written
                view = view[written:]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.nbytes)
            raise
        if durable:
            os.fsync(self._fd)
        self.nbytes = position

    def close(self) -> None:
        """No more is appended."""
        os.close(self._fd)
