"""Columns that the files of many ranks have in common, decoded once.

Ranks of a job record the same names at the same steps, so most columns of their tables consist of
the same bytes. Equal bytes of a column under the same schema are equal values.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.files import open_regular

if TYPE_CHECKING:
    import pyarrow as pa

_NAMES = frozenset((
    "name", "kind", "step", "call", "seq", "dtype", "shape", "shard_offsets", "shard_placements",
    "count", "nans", "posinfs", "neginfs",
))  # fmt: skip
_LARGEST = 32 << 20  # bytes of all decoded columns
_LARGEST_KEY = 1 << 20  # bytes of a column in its file


class SharedColumns:
    """Decoded columns, by their bytes in a file."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], pa.ChunkedArray] = {}
        self._nbytes = 0

    def keys(self, path: Path, footer: Any, columns: list[str]) -> dict[str, bytes]:
        """Return the bytes that a file has for each of the columns which may be shared.

        The file must have the schema of the format.
        """
        keys = {}
        with open_regular(path) as file:
            for name, ranges in _byte_ranges(footer, _NAMES.intersection(columns)).items():
                if all(s >= 0 for s, _ in ranges) and sum(n for _, n in ranges) <= _LARGEST_KEY:
                    keys[name] = b"".join(os.pread(file.fileno(), n, s) for s, n in ranges)
        return keys

    def get(self, name: str, key: bytes) -> pa.ChunkedArray | None:
        """Return a column that is known, or None."""
        return self._known.get((name, key))

    def add(self, name: str, key: bytes, column: pa.ChunkedArray) -> None:
        """Keep a column; it has been validated."""
        self._nbytes += column.nbytes
        if self._nbytes > _LARGEST:
            self._known, self._nbytes = {}, column.nbytes
        self._known[name, key] = column


def _byte_ranges(footer: Any, wanted: frozenset[str]) -> dict[str, list[tuple[int, int]]]:
    """Return the start and size of each chunk of columns; those of nested columns are several."""
    leaves = [
        (i, footer.schema.column(i).path.partition(".")[0]) for i in range(footer.num_columns)
    ]
    leaves = [(i, name) for i, name in leaves if name in wanted]
    found: dict[str, list[tuple[int, int]]] = {}
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        for i, name in leaves:
            chunk = row_group.column(i)
            start = chunk.data_page_offset
            if chunk.has_dictionary_page:
                start = min(start, chunk.dictionary_page_offset)
            found.setdefault(name, []).append((start, chunk.total_compressed_size))
    return found
