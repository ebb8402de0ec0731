"""The sink that writes records into a run on disk.

A row is written after its payload, and a payload file is renamed to its final name when it is
complete. A reader of the run, now or after a crash, sees a consistent prefix.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import importlib
import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensortap import values as frameworks
from tensortap.capture.ledger import ERROR, Entry, Ledger, each_record
from tensortap.capture.sink import Sink, Wake
from tensortap.capture.ticket import settle
from tensortap.core.buffers import view_of
from tensortap.core.files import folder_mode, leads_to
from tensortap.core.record import Kind, Record, TensorData
from tensortap.core.values import tensors
from tensortap.runs import layout, rows, tables
from tensortap.runs.payloads import TensorFile
from tensortap.runs.rows import Payload, Row
from tensortap.stats.columns import RecordColumns

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("tensortap")

_FILE = 64 << 20  # bytes after which a payload file is closed
_TAIL_ROWS = 64 << 10  # rows after which the tail is sealed
_TAIL_BYTES = 32 << 20  # bytes after which the tail is sealed
_ROWS = 8192  # rows that are written together
_AGE = 0.25  # seconds until a record is visible to readers
_RETRY = 1.0  # seconds between attempts to write to a full disk
_DIGESTS = 256  # recent digests per name, for deduplication
_RESERVE = 256 << 10  # bytes kept free to write at the end what is missing


class StoreSink(Sink):
    """Writes the part of one rank of a run."""

    pending = 0
    failing = ""
    takes_columns = True
    patience = _AGE

    def __init__(
        self, run: Path, rank: int, *, durable: bool = False, ledger: Ledger | None = None
    ) -> None:
        self.ledger = ledger or Ledger()
        self.run = run
        self.rank = rank
        self.durable = durable
        self._records = layout.records_folder(run, rank)
        self._tensors = run / "tensors" / layout.rank_name(rank)
        for folder in (self._records, self._tensors):
            folder.parent.mkdir(mode=folder_mode(), parents=True, exist_ok=True)
            folder.mkdir(mode=folder_mode(), exist_ok=True)
        self._schema = rows.schema()
        # sealing needs these: not in the middle of training
        for module in ("pyarrow.compute", "pyarrow.parquet"):
            importlib.import_module(module)
        self._file: TensorFile | None = None
        self._files = _next_number(self._tensors, "*.safetensors")
        self._part = _next_number(self._records, "*.parquet")
        self._encoder = rows.ColumnEncoder(self._schema)
        self._rows: list[Row | RecordColumns | Record] = []  # not yet in the tail
        self._entries: list[Entry] = []  # whose rows these are
        self._in_file: set[int] = set()  # indices of those with payloads in the open file
        self._since = time.monotonic()
        self._retry_at = 0.0
        self._waiting: collections.deque[Entry] = collections.deque()
        self._dropped: collections.deque[Row] = collections.deque()
        self._stored: dict[str, collections.OrderedDict[bytes, Payload]] = {}
        self._tail = self._open_tail()
        self._gone = False  # the folder was removed or replaced: everything is dropped
        # open, so that no other folder gets its inode
        self._folder = os.open(run, os.O_RDONLY)
        weakref.finalize(self, os.close, self._folder)
        self._reserve = self._records / ".reserve"
        with contextlib.suppress(OSError), open(self._reserve, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVE)

    # -- what the queue calls -------------------------------------------------------------

    def room(self) -> int:
        return 0 if self.failing and not self._gone else 1 << 62

    def send(self, entries: list[Entry]) -> None:
        self._waiting.extend(entries)
        self.pending += sum([nbytes for _, _, nbytes in entries])
        self._work()

    def wait(self, wake: Wake, timeout: float) -> None:
        due: float | None = None
        if self.failing:
            due = None if self._gone else self._retry_at
        elif self._rows or self._file or self._dropped:
            due = self._since + _AGE
        if due is not None:
            timeout = min(timeout, max(0.0, due - time.monotonic()))
        wake.wait(timeout)
        if due is not None and time.monotonic() >= due:
            self._work()
            if not self._waiting:
                self._try(self._commit)

    def hurry(self) -> None:
        if not self.failing:
            self._try(self._commit)

    def give_up(self) -> list[Entry]:
        lost = [*self._entries, *self._waiting]
        self._entries, self._rows = [], []
        self._waiting.clear()
        self.pending = 0
        return lost

    def close(self) -> None:
        self._work()
        if not self._gone and (self._waiting or not self._try(self._commit)) and not self._gone:
            self._write_missing()
        if not self._gone and self._try(self._seal):
            self._reserve.unlink(missing_ok=True)
        self._tail.close()

    def is_intact(self) -> bool:
        """Return whether the path of the run leads to the folder of the start; for any thread."""
        return leads_to(self.run, self._folder)

    def note_dropped(self, name: str, kind: Kind, step: int, rank: int) -> None:
        """Write a row that says which value is missing in the run."""
        record = Record(name, kind, step, 0, -1, rank, 1, time.time_ns())
        self._dropped.append(rows.row_of(record, None, [], missing=True))

    # -- writing -------------------------------------------------------------------------

    def _write_missing(self) -> None:
        """Write that values are missing which a full disk has no room for, and count them."""
        lost = [self._entries[i] for i in sorted(self._in_file)]
        if self._file is not None:
            self._file.discard()
            self._file = None
        rows = [(e, r) for i, (e, r) in enumerate(zip(self._entries, self._rows, strict=True))
                if i not in self._in_file]  # fmt: skip
        self._entries, self._rows = [e for e, _ in rows], [r for _, r in rows]
        self._in_file.clear()
        lost += self._waiting
        self._waiting.clear()
        for record, _, _ in each_record(lost):
            self.note_dropped(record.name, record.kind, record.step, record.rank)
        self._reserve.unlink(missing_ok=True)  # makes room for the rows
        with contextlib.suppress(OSError):
            self._commit()
        lost = list(each_record([*lost, *self.give_up()]))
        self.ledger.drop(lost, ERROR)
        log.warning("tensortap: %d values are missing in %s: %s", len(lost), self.run, self.failing)

    def _try(self, work: Callable[[], None]) -> bool:
        """Do the work; return False if the disk is full, which is logged once and retried."""
        try:
            work()
        except (FileNotFoundError, NotADirectoryError):
            self._abandon()
            return False
        except OSError as error:
            self._retry_at = time.monotonic() + _RETRY
            if not self.failing:
                self.failing = os.strerror(error.errno) if error.errno else str(error)
                log.warning("tensortap: cannot write to %s: %s; retrying", self.run, error)
            return False
        if self.failing:
            self.failing = ""
            log.warning("tensortap: writing to %s works again", self.run)
        return True

    def _abandon(self) -> None:
        """Drop what is not written, and everything from now on: somebody removed the folder."""
        self._gone, self.failing = True, "it was removed or replaced"
        if self._file is not None:
            self._file.discard(remove=False)
            self._file = None
        log.warning("tensortap: %s was removed or replaced while it was written; "
                    "what is captured from now on is dropped", self.run)  # fmt: skip
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        self._in_file.clear()
        self._dropped.clear()
        self.ledger.drop(self.give_up(), ERROR)

    def _check_folder(self) -> None:
        """Raise FileNotFoundError unless readers of the path find what is written."""
        if not (self.is_intact() and self._tail.is_at(self._records / layout.TAIL)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.run))

    def _work(self) -> None:
        if self._gone:
            self._drop_waiting()
        while self._waiting:
            if not self._try(self._take_one):
                with contextlib.suppress(OSError):  # readers see what there was room for
                    if not self._gone:
                        self._commit()
                return
            if len(self._rows) >= _ROWS and not self._try(self._commit):
                return

    def _take_one(self) -> None:
        entry = self._waiting[0]
        record: Any = entry[0]
        if type(record) is RecordColumns or rows.is_number(record):
            self._rows.append(record)
        elif (value := rows.encode_inline(record.value)) is not None:
            self._rows.append(rows.row_of(record, value, []))
        else:
            self._take_large(record)
        self._entries.append(entry)
        self._waiting.popleft()

    def _take_large(self, record: Record) -> None:
        """Write the payloads of a record, then its row."""
        index = itertools.count()
        value = rows.encode_value(record.value, lambda block: next(index))
        large = [t for t in tensors(record.value) if type(t.data) is not bytes]
        digests = [frameworks.digest(tensor) for tensor in large]
        payloads = [
            self._store(record, i, tensor, digest)
            for i, (tensor, digest) in enumerate(zip(large, digests, strict=True))
        ]
        if self._file is not None and any(p.file == self._name_of(self._file) for p in payloads):
            self._in_file.add(len(self._rows))
        if record.digest is None and record.value is large[0]:
            record = msgspec.structs.replace(record, digest=digests[0])
        self._rows.append(rows.row_of(record, value, payloads))

    def _store(self, record: Record, index: int, tensor: TensorData, digest: bytes) -> Payload:
        """Write a payload unless one with the same name and digest was written recently."""
        stored = self._stored.setdefault(record.name, collections.OrderedDict())
        if digest in stored:
            stored.move_to_end(digest)
            return stored[digest]
        key = f"{record.name}@{record.step}:{record.seq}" + (f".{index}" if index else "")
        if self._file is not None and (self._file.nbytes >= _FILE or not self._file.fits(key)):
            self._commit()
        if self._file is None:
            self._check_folder()
            name = f"{self._files:06d}.safetensors"
            self._file = TensorFile(self._tensors / name)
        file = self._file
        file.add(key, tensor.dtype, tensor.shape, view_of(tensor.data))
        payload = stored[digest] = Payload(self._name_of(file), key)
        if len(stored) > _DIGESTS:
            stored.popitem(last=False)
        return payload

    def _name_of(self, file: TensorFile) -> str:
        return f"{layout.rank_name(self.rank)}/{file.path.name}"

    def _commit(self) -> None:
        """Close the payload file and write the rows that refer to it."""
        self._check_folder()
        if self._file is not None:
            self._file.close(durable=self.durable)
            self._file = None
            self._files += 1
            self._in_file.clear()
        self._since = time.monotonic()
        dropped = len(self._dropped)
        written = [*self._rows, *itertools.islice(self._dropped, dropped)]
        if not written:
            return
        batch = rows.joined(list(self._batches(written)))
        self._tail.append(batch.serialize(), durable=self.durable)
        self._check_folder()
        self._tail_rows += batch.num_rows
        for _ in range(dropped):
            self._dropped.popleft()
        done, self._entries, self._rows = self._entries, [], []
        self.pending -= sum([nbytes for _, _, nbytes in done])
        settle(done, True)
        if self._tail_rows >= _TAIL_ROWS or self._tail.nbytes >= _TAIL_BYTES:
            self._seal()

    def _batches(self, written: list[Any]) -> Iterator[pa.RecordBatch]:
        for kind, group in itertools.groupby(written, type):
            if kind is RecordColumns:
                yield from map(self._encoder.batch_of, group)
            elif kind is Record:
                yield self._encoder.batch_of_numbers(list(group))
            else:
                yield rows.batch_of(list(group), self._schema)

    def _open_tail(self) -> tables.TailFile:
        columns = self._schema.with_metadata(tables.metadata(self._part))
        self._tail_rows = 0
        return tables.TailFile(self._records / layout.TAIL, columns.serialize())

    def _seal(self) -> None:
        """Rewrite the tail as a Parquet file and start a new tail."""
        if not self._tail_rows:
            return
        path = self._records / f"{self._part:04d}.parquet"
        tables.seal(self._records / layout.TAIL, path, self._part, durable=self.durable)
        self._part += 1
        self._tail.close()
        self._tail = self._open_tail()


def _next_number(folder: Path, pattern: str) -> int:
    numbers = [int(path.name.partition(".")[0]) for path in folder.glob(pattern)]
    return max(numbers, default=-1) + 1
