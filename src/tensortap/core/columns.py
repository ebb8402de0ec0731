"""Small records as columns: what they have in common once, one row of numbers for each, payloads.

A training program gathers small records as columns, and a server keeps them so. A record in a
column takes little more than its payload, and creating it costs nothing until somebody reads it.

The body of a block has a row of five 64-bit integers per record, in the order of capture: its
column, step, call, seq and time. The payloads of the first column follow, then of the second, and
so on.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from tensortap.core.record import Kind, Record, TensorData

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROW_NBYTES = 40
_COLUMN, _STEP, _SEQ, _TIME = 0, 1, 3, 4  # fields of a row
_NUMBERS = {"float": struct.Struct("<d"), "int": struct.Struct("<q")}


class Column(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Metadata that all records of a column share.

    `framework` is that of their tensors, or ``float`` or ``int`` for numbers of Python.
    """

    name: str
    kind: Kind
    rank: int
    world_size: int
    type: str
    framework: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_number(self) -> bool:
        """True if the records hold numbers of Python."""
        return self.framework in _NUMBERS


class Columns:
    __slots__ = ("_payload", "_rows", "column", "positions", "size")

    def __init__(
        self,
        column: Column,
        rows: NDArray[np.int64],
        payload: bytes | memoryview,
        size: int,
        positions: NDArray[np.int64],
    ) -> None:
        self.column = column
        self.size = size  # bytes of a payload
        self.positions = positions  # of the records in their block, or in a history
        self._rows = rows
        self._payload = payload

    def __len__(self) -> int:
        return len(self._rows)

    def time_ns_of(self, index: int) -> int:
        return int(self._rows[index, _TIME])

    @property
    def ordered(self) -> bool:
        """True if no record is older than the one before."""
        times = self._rows[:, _TIME]
        return bool((times[1:] >= times[:-1]).all())

    def records(
        self, start: int, stop: int, *, step: int | None = None, seq: int | None = None
    ) -> list[Record]:
        """Return records from `start` to before `stop`, only those of a step or seq if given."""
        rows = self._rows[start:stop]
        indices: Sequence[int] = range(start, stop)
        for field, number in ((_STEP, step), (_SEQ, seq)):
            if number is not None:
                (found,) = (rows[:, field] == number).nonzero()
                rows, indices = rows[found], [indices[i] for i in found.tolist()]
        return [self._record(*each) for each in zip(indices, rows.tolist(), strict=True)]

    def _record(self, index: int, row: list[int]) -> Record:
        column, offset = self.column, index * self.size
        _, step, call, seq, time_ns = row
        number = _NUMBERS.get(column.framework)
        if number is not None:
            value = number.unpack_from(self._payload, offset)[0]
        else:
            data = bytes(self._payload[offset : offset + self.size])
            value = TensorData(column.framework, column.dtype, column.shape, data)
        return Record(
            column.name, column.kind, step, call, seq, column.rank, column.world_size, time_ns,
            column.type, column.dtype, column.shape, None, None, value,
        )  # fmt: skip


def split(
    columns: Sequence[Column], sizes: Sequence[int], count: int, body: bytes | bytearray
) -> list[Columns]:
    """Return the columns of a block that have records; raise ValueError if it is malformed.

    `sizes` are the bytes of a payload of each column, and `count` is the number of records.
    """
    import numpy as np  # late: importing tensortap must not load it

    if count * ROW_NBYTES > len(body):
        raise ValueError(f"{count} records in {len(body)} bytes")
    rows = np.frombuffer(body, "<i8", 5 * count).reshape(count, 5)
    which = rows[:, _COLUMN]
    if count and not 0 <= which.min() <= which.max() < len(columns):
        raise ValueError("a record of a column that does not exist")
    counts = np.bincount(which, minlength=len(columns)).tolist()
    # in integers of Python: sizes are what a client claims
    ends = list(itertools.accumulate([n * size for n, size in zip(counts, sizes, strict=True)]))
    payload = memoryview(body)[count * ROW_NBYTES :]
    if payload.nbytes != sum(ends[-1:]):
        raise ValueError(f"{sum(ends[-1:])} bytes of payloads expected, got {payload.nbytes}")
    order = np.arange(count)
    if len(columns) == 1:
        return [Columns(columns[0], rows, payload, sizes[0], order)] if count else []
    by_column = np.argsort(which, kind="stable")
    found, first = [], 0
    for column, size, n, end in zip(columns, sizes, counts, ends, strict=True):
        if n:
            # a copy of each: the history may evict one column and keep another
            mine = by_column[first : first + n].copy()
            data = bytes(payload[end - n * size : end])
            found.append(Columns(column, rows[mine], data, size, mine))
            first += n
    return found


def merged(found: Iterable[Columns]) -> list[Record]:
    """Return the records of all columns of a block, in their order."""
    records: list[Record] = []
    order: list[int] = []
    for each in found:
        records += each.records(0, len(each))
        order += each.positions.tolist()
    return [records[i] for i in sorted(range(len(order)), key=order.__getitem__)]
