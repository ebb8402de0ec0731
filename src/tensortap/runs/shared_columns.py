"""Columns that the files of many ranks have in common, decoded once.

Ranks of a job record the same names at the same steps, so most columns of their tables consist of
the same bytes. Equal bytes of a column under the same schema are equal values.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.files import open_regular

if TYPE_CHECKING:
    import pyarrow as pa

_NAMES = frozenset((
    "name", "kind", "step", "call", "seq", "dtype", "shape", "shard_offsets", "shard_placements",
    "count", "nans", "posinfs", "neginfs",
))  # fmt: skip
_LARGEST = 32 << 20  # bytes of all decoded columns
_LARGEST_KEY = 1 << 20  # bytes of a column in its file
SHARED = "shared:"
"""With the name of a column, the key of its number in the metadata of a schema."""


class SharedColumn(NamedTuple):
    """A decoded column; columns with the same number are the same."""

    number: int
    cells: pa.ChunkedArray


class SharedColumns:
    """Decoded columns, by their bytes in a file."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], SharedColumn] = {}
        self._nbytes = 0
        self._numbers = itertools.count()  # threads never get the same one

    def keys(
        self, path: Path, footer: Any, roots: Sequence[str], columns: list[str]
    ) -> dict[str, bytes]:
        """Return the bytes that a file has for each of the columns which may be shared.

        The file must have the schema of the format; `roots` has the column of each leaf.
        """
        wanted = [(i, name) for i, name in enumerate(roots) if name in _NAMES and name in columns]
        found = {
            name: ranges
            for name, ranges in _byte_ranges(footer, wanted).items()
            if all(s >= 0 for s, _ in ranges) and sum(n for _, n in ranges) <= _LARGEST_KEY
        }
        low = min((start for ranges in found.values() for start, _ in ranges), default=0)
        high = max((s + n for ranges in found.values() for s, n in ranges), default=0)
        with open_regular(path) as file:
            fd = file.fileno()
            if high - low > _LARGEST_KEY:
                return {
                    name: b"".join(os.pread(fd, n, start) for start, n in ranges)
                    for name, ranges in found.items()
                }
            data = os.pread(fd, high - low, low)  # mostly, small columns lie side by side
        return {
            name: b"".join(data[start - low : start - low + n] for start, n in ranges)
            for name, ranges in found.items()
        }

    def get(self, name: str, key: bytes) -> SharedColumn | None:
        """Return a column that is known, or None."""
        return self._known.get((name, key))

    def add(self, name: str, key: bytes, cells: pa.ChunkedArray) -> SharedColumn:
        """Keep a column; it has been validated."""
        self._nbytes += cells.nbytes
        if self._nbytes > _LARGEST:
            self._known, self._nbytes = {}, cells.nbytes
        column = self._known[name, key] = SharedColumn(next(self._numbers), cells)
        return column


def _byte_ranges(footer: Any, leaves: list[tuple[int, str]]) -> dict[str, list[tuple[int, int]]]:
    """Return the start and size of each chunk of columns; those of nested columns are several."""
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
