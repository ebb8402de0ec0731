"""Columns that grow at their end, and exponent counts as a matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.runs.arrow import coded, lists, numbers

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]


class GrowingArray:
    """An array with room at its end."""

    def __init__(self, dtype: type) -> None:
        self._buffer: NDArray[Any] = np.empty(0, dtype)
        self.size = 0

    def extend(self, values: NDArray[Any]) -> None:
        """Append values."""
        end = self.size + len(values)
        if end > len(self._buffer):
            larger = np.empty(max(end, 2 * self.size), self._buffer.dtype)
            larger[: self.size] = self.values
            self._buffer = larger
        self._buffer[self.size : end] = values
        self.size = end

    @property
    def values(self) -> NDArray[Any]:
        """All values so far."""
        return self._buffer[: self.size]


class InternedColumn:
    """A column of texts: one code per row, and the texts in order of first appearance."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._codes: dict[str, int] = {}
        self._rows = GrowingArray(np.int32)

    def extend(self, column: pa.ChunkedArray) -> None:
        """Append an Arrow column."""
        codes, texts = coded(column)
        for text in texts:
            if text not in self._codes:
                self._codes[text] = len(self.texts)
                self.texts.append(text)
        self._rows.extend(np.array([self._codes[text] for text in texts], np.int32)[codes])

    def code(self, text: str) -> int:
        """Return the code of a text, or -1."""
        return self._codes.get(text, -1)

    @property
    def values(self) -> NDArray[np.int32]:
        """The code of each row."""
        return self._rows.values


class SeriesIndex:
    """The rows of each kind and name, by their codes."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], list[Integers]] = {}
        self._size = 0

    def update(self, kinds: NDArray[np.int32], names: NDArray[np.int32]) -> None:
        """Add the rows that are new in two columns of codes."""
        start, self._size = self._size, len(kinds)
        keys = kinds[start:].astype(np.int64) << 32 | names[start:]
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        edges = np.flatnonzero(np.diff(ordered, prepend=-1))
        for first, rows in zip(edges, np.split(order + start, edges[1:]), strict=False):
            key = int(ordered[first])
            self._rows.setdefault((key >> 32, key & 0xFFFFFFFF), []).append(rows)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._rows)

    def rows(self, kind: int, name: int) -> Integers:
        """Return the rows of a kind and a name, in ascending order."""
        parts = self._rows.get((kind, name), [])
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0] if parts else np.empty(0, np.int64)


def dense_counts(
    table: pa.Table, targets: Integers, low: int | None = None, high: int | None = None
) -> tuple[int, Integers]:
    """Return the lowest exponent, and a matrix of counts: one row per exponent.

    Row `i` of the table fills column ``targets[i]``. The first and the last row of the matrix
    count what lies below `low` and above `high`, by default the range that occurs.

    >>> import pyarrow as pa
    >>> table = pa.table({"first_bin": [1, -1], "bins": [[5], [2, 0, 3]]})
    >>> dense_counts(table, np.array([1, 0]), low=0)
    (0, array([[2, 0],
           [0, 0],
           [3, 5],
           [0, 0]]))
    """
    import pyarrow as pa

    chunks = []
    for batch in table.to_batches():  # one after the other, to bound temporary memory
        lengths, values = lists(pa.chunked_array([batch.column("bins")]))
        first = np.nan_to_num(numbers(batch.column("first_bin"))).astype(np.int64)
        chunks.append((first, lengths, values))
    used = [(first[n > 0], n[n > 0]) for first, n, _ in chunks if n.any()]
    if low is None:
        low = min((int(first.min()) for first, _ in used), default=0)
    if high is None:
        high = max((int((first + n).max()) - 1 for first, n in used), default=low)
    counts = np.zeros((high - low + 3, table.num_rows), np.int64)
    start = 0
    for first, lengths, values in chunks:
        ends = np.cumsum(lengths)
        exponents = np.arange(len(values)) - np.repeat(ends - lengths - first, lengths)
        columns = targets[np.repeat(np.arange(start, start + len(first)), lengths)]
        start += len(first)
        inside = (exponents >= low) & (exponents <= high)
        if inside.all():
            counts[exponents - low + 1, columns] = values
            continue
        counts[exponents[inside] - low + 1, columns[inside]] = values[inside]
        for outside, total in ((exponents < low, counts[0]), (exponents > high, counts[-1])):
            np.add.at(total, columns[outside], values[outside])
    return low, counts
