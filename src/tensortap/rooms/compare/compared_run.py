"""One of two compared runs, and how to read its values."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tensortap.core.record import Kind, Record, TensorData
from tensortap.rooms.dump.files import load_file
from tensortap.runs.assemble import assemble
from tensortap.runs.reader import value_of
from tensortap.runs.rows import NO_VALUE
from tensortap.runs.run_reader import RunReader
from tensortap.runs.tables import NameCounts
from tensortap.runs.windows import WindowBlock, covering
from tensortap.table.sources import RecordSource, RunSource
from tensortap.table.table import Table, table_of
from tensortap.values.rebuild import rebuild
from tensortap.values.snapshot import borrow
from tensortap.values.view import as_numpy


class RecordPart(NamedTuple):
    """A record without its value: a whole tensor or one shard. Small enough to send to workers."""

    record: Record  # without its value
    data: bytes | None = None
    places: list[dict[str, str]] | None = None
    ranks: tuple[int, ...] = ()  # that have the same, if there are several

    @property
    def has_value(self) -> bool:
        """Return whether the record has a value, not only statistics."""
        return "file" in self.record.tags or self.data != NO_VALUE or self.record.stats is None


_BATCHED = (Kind.ACTIVATION, Kind.GRADIENT)


def batch_of(record: Record) -> Any:
    """Return which part of the global batch a record belongs to; None if it is no such part."""
    if record.kind not in _BATCHED:
        return None
    return record.tags.get("batch") if "placements" in record.tags else record.rank


class ComparedRun:
    """A run or a live session that is compared."""

    def __init__(self, source: Any, *, trust: bool = False) -> None:
        self.trust = trust
        self.path: Path | None = None
        self._table: Table | None = None
        self._held: dict[tuple[int, int, int, int], Record] = {}  # for a live session
        if isinstance(source, (str, Path)):
            self.reader: Any = RunReader(source)
        else:
            self.reader = getattr(source, "reader", source)
        self.title = "the live session"
        if isinstance(self.reader, RunReader):
            self.path, self.title = self.reader.path, self.reader.where

    @functools.cached_property
    def ranks(self) -> list[int]:
        """The ranks of the run."""
        return self.reader.ranks if self.is_compacted else self.table().ranks()

    @property
    def is_compacted(self) -> bool:
        """Whether windows hold all records, so that some of them can be read by themselves."""
        if not isinstance(self.reader, RunReader):
            return False
        known, by_rank = covering(self.reader.windows), self.reader.by_rank
        return known is not None and all(
            known.covered.get(rank, 0) >= tables.count for rank, tables in by_rank.items()
        )

    @property
    def names(self) -> NameCounts:
        """The numbers of records of a compacted run, by name and kind."""
        known = covering(self.reader.windows)
        return known.names if known is not None else {}

    def part(self, steps: tuple[int | None, int | None], tensors: set[tuple[str, str]]) -> Table:
        """Return the records of some steps, kinds and names of a compacted run, and few others."""
        low, high = ((-math.inf, math.inf)[i] if s is None else s for i, s in enumerate(steps))
        blocks = [
            WindowBlock(window.records, group)
            for window in self.reader.windows
            if window.manifest.first <= high and window.manifest.last >= low
            for group in window.records.groups(tensors)
        ]
        return Table(lambda: RunSource(self.reader, blocks))

    def table(self) -> Table:
        """Return the table of all records; those that a live session gets later do not count."""
        if self._table is None and isinstance(self.reader, RunReader):
            self._table = table_of(self.reader)
        elif self._table is None:
            held = [record for name in self.reader.names() for record in self.reader.records(name)]
            self._held = {_place(record): record for record in held}
            self._table = Table(lambda: RecordSource(lambda seen: held[seen:], values=False))
        return self._table

    def file(self, part: RecordPart) -> Path | None:
        """Return the file of a dumped object, if the record has one."""
        name = part.record.tags.get("file")
        return None if name is None or self.path is None else self.reader.file(name)

    def value(self, part: RecordPart) -> Any:
        """Return the value of a record, as nodes or as an object."""
        file = self.file(part)
        if file is not None:
            return load_file(file, trust=self.trust)
        if isinstance(self.reader, RunReader):
            value = self.reader.value_of(part.data, part.places)
            return value_of(msgspec.structs.replace(part.record, value=value))
        return value_of(self.reader.load(self._held[_place(part.record)]))


def _place(record: Record) -> tuple[int, int, int, int]:
    return record.rank, record.seq, record.step, record.call


def whole(side: ComparedRun, parts: list[RecordPart]) -> Any:
    """Return the value of one record, or a tensor assembled from its shards."""
    if len(parts) == 1 and parts[0].record.shard is None:
        return side.value(parts[0])
    return assemble((part.record, _array(side, part)) for part in parts)


def part_of(side: ComparedRun, part: RecordPart, total: Any) -> tuple[Any, Any]:
    """Return the array of a shard, and the same part of the whole tensor of another run."""
    array = _array(side, part)
    total = as_numpy(total) if isinstance(total, TensorData) else np.asarray(total)
    offsets = part.record.shard.offsets if part.record.shard is not None else (0,) * array.ndim
    array = array.reshape((1,) * (total.ndim - array.ndim) + array.shape)  # one of a stack
    at = (slice(start, start + size) for start, size in zip(offsets, array.shape, strict=False))
    return array, total[tuple(at)]


def _array(side: ComparedRun, part: RecordPart) -> Any:
    value = side.value(part)
    if side.file(part) is not None:  # an object, not nodes
        value = borrow(value)
    return as_numpy(value) if isinstance(value, TensorData) else np.asarray(rebuild(value))
