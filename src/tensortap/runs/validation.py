"""Checks of tables that somebody else may have written: Arrow trusts them and would crash."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.files import CorruptFile
from tensortap.record import Kind
from tensortap.runs.arrow import numbers
from tensortap.runs.rows import COLUMNS, schema

if TYPE_CHECKING:
    import pyarrow as pa

_REQUIRED = (*COLUMNS[:8], "missing")
_KINDS = frozenset(kind.value for kind in Kind)
_EXPONENTS = 1 << 15  # longdouble has 16,445 below 0


def unreadable() -> tuple[type[Exception], ...]:
    """Return the errors that pyarrow raises for damaged files."""
    import pyarrow as pa

    return (pa.ArrowException, EOFError, OSError, ValueError, TypeError, MemoryError)


def check_columns(path: Path, found: pa.Schema) -> bool:
    """Raise CorruptFile unless a table has the columns of the format.

    Return whether it has no others.
    """
    if found.equals(schema()):
        return True
    for field in schema():
        if found.get_field_index(field.name) < 0 or found.field(field.name).type != field.type:
            raise CorruptFile(f"{path} is not a table of a run: its column {field.name} is missing")
    return False


def validated(rows: Any, rank: int) -> Any:
    """Return rows after checking each of their bytes: Arrow trusts offsets and would crash."""
    import pyarrow.compute as pc

    rows.validate(full=True)
    names = rows.schema.names
    for name in _REQUIRED:
        if name in names and rows.column(name).null_count:
            raise ValueError(f"the column {name} has empty cells")
    if "rank" in names and (numbers(rows.column("rank")) != rank).any():
        raise ValueError(f"it has rows of other ranks than {rank}")
    if "kind" in names and not _KINDS.issuperset(rows.column("kind").unique().to_pylist()):
        raise ValueError("it has records of unknown kinds")
    if "first_bin" in names and "bins" in names:
        first = np.nan_to_num(numbers(rows.column("first_bin")))
        last = first + np.nan_to_num(numbers(pc.list_value_length(rows.column("bins"))))
        if (first < -_EXPONENTS).any() or (last > _EXPONENTS).any():
            raise ValueError("it counts exponents that no number has")
    return rows


def is_compressed(message: pa.Message) -> bool:
    """Return whether the body of a record batch is compressed, as its flatbuffer says."""
    data = message.metadata.to_pybytes()

    def field(table: int, number: int) -> int:
        vtable = table - struct.unpack_from("<i", data, table)[0]
        (size,) = struct.unpack_from("<H", data, vtable)
        if 4 + 2 * number >= size:
            return 0
        (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * number)
        return table + int(offset) if offset else 0

    header = field(struct.unpack_from("<I", data)[0], 2)
    batch = header + int(struct.unpack_from("<I", data, header)[0])
    return field(batch, 3) != 0
