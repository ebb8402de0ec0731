"""Columns that grow at their end, and exponent counts as a matrix."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.alerts import Alert, alert_of
from tensortap.core.record import Kind, Record
from tensortap.runs.arrow import coded, lists, numbers, valid_cells
from tensortap.runs.rows import NO_VALUE, decode_value
from tensortap.stats.shard_digest import SIZE as DIGEST_SIZE

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from tensortap.table.table import Table

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]


VALUE = "value"
"""The statistic of records that are single numbers; the column ``number`` of the run format."""

_ALERT = ["name", "step", "call", "seq", "rank", "value"]  # the columns of `alerts_of`
_MOST_ALERTS = 10_000  # a small file may hold hundreds of thousands, which nobody reads
HAS_NUMBER = "has_number"  # 1 where `number` is given, even as NaN
NONFINITE = "nonfinite"  # the sum of these:
NONFINITE_COUNTS = ("nans", "posinfs", "neginfs")
_MIX = tuple(
    (np.uint64(shift), np.uint64(factor))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
)


class Exponents(NamedTuple):
    """The exponent counts of many tensors, one column each: ``counts[i]`` is for ``low + i``.

    `min_abs` and `max_abs` are the exact extremes; 0.0 means that the minimum is unknown.
    """

    low: int
    counts: Integers
    min_abs: Floats
    max_abs: Floats


class GrowingArray:
    """An array with room at its end."""

    def __init__(self, dtype: type) -> None:
        self._buffer: NDArray[Any] = np.empty(0, dtype)
        self.size = 0

    def reserve(self, count: int) -> None:
        """Make room for more values, so that they need not be copied again."""
        end = self.size + count
        if end > len(self._buffer):
            larger = np.empty(max(end, 2 * self.size), self._buffer.dtype)
            larger[: self.size] = self.values
            self._buffer = larger

    def extend(self, values: NDArray[Any]) -> None:
        """Append values."""
        self.reserve(len(values))
        self._buffer[self.size : self.size + len(values)] = values
        self.size += len(values)

    @property
    def values(self) -> NDArray[Any]:
        """All values so far."""
        return self._buffer[: self.size]


class InternedColumn:
    """A column of texts: one code per row, and the texts in order of first appearance."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._codes: dict[str, int] = {}
        self.rows = GrowingArray(np.int32)

    def extend(self, column: pa.ChunkedArray) -> None:
        """Append the texts of an Arrow column."""
        self.extend_coded(*coded(column))

    def extend_coded(self, codes: NDArray[Any], texts: list[str]) -> None:
        """Append texts by their codes; new ones get new codes."""
        for text in texts:
            if text not in self._codes:
                self._codes[text] = len(self.texts)
                self.texts.append(text)
        self.rows.extend(np.array([self._codes[text] for text in texts], np.int32)[codes])

    def code(self, text: str) -> int:
        """Return the code of a text, or -1."""
        return self._codes.get(text, -1)


class SeriesIndex:
    """The rows of each kind and name, by their codes."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], list[Integers]] = {}
        self._size = 0

    def update(self, kinds: NDArray[np.int32], names: NDArray[np.int32]) -> None:
        """Add the rows that are new in two columns of codes."""
        start, self._size = self._size, len(kinds)
        if start == len(kinds):
            return
        width = int(names.max()) + 1
        keys = kinds[start:] * np.int32(width) + names[start:]  # kinds are few
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        edges = np.flatnonzero(np.diff(ordered, prepend=-1))
        order += start
        for first, rows in zip(edges, np.split(order, edges[1:]), strict=False):
            self._rows.setdefault(divmod(int(ordered[first]), width), []).append(rows)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._rows)

    def rows(self, kind: int, name: int) -> Integers:
        """Return the rows of a kind and a name, in ascending order."""
        parts = self._rows.get((kind, name), [])
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0] if parts else np.empty(0, np.int64)


def mixed(columns: Sequence[NDArray[Any]], count: int) -> NDArray[np.uint64]:
    """Return 64 bits of each row of numbers; two different rows have the same ones by chance only.

    >>> mixed([np.array([1.0, 1.0, 2.0]), np.array([5, 5, 5])], 3) == mixed([np.ones(3)], 3)
    array([False, False, False])
    """
    bits = np.full(count, len(columns), np.uint64)
    for column in columns:
        bits ^= column.astype(np.float64).view(np.uint64)
        for shift, factor in _MIX:  # as splitmix64 does
            bits ^= bits >> shift
            bits *= factor
    return bits ^ (bits >> np.uint64(31))


def digest_bits(column: pa.ChunkedArray) -> NDArray[np.uint64]:
    """Return 64 bits of each digest that `stats.shard_digest` made; 0 for others and for none.

    >>> import pyarrow as pa
    >>> digest_bits(pa.chunked_array([[bytes(range(25)), b"another", None]])) > 0
    array([ True, False, False])
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    is_whole = pc.fill_null(pc.equal(pc.binary_length(column), DIGEST_SIZE), False)
    cells = pc.if_else(is_whole, column, bytes(DIGEST_SIZE)).cast(pa.binary(DIGEST_SIZE))
    data = b"".join(np.frombuffer(c.buffers()[1], f"V{DIGEST_SIZE}", len(c), c.offset * DIGEST_SIZE)
                    .tobytes() for c in cells.chunks)  # fmt: skip
    raw = np.frombuffer(data, np.uint8).reshape(-1, DIGEST_SIZE)[:, 1:]  # without the version
    words = np.ascontiguousarray(raw).view(np.uint64)
    factors = np.array([1, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9], np.uint64)
    return np.asarray((words * factors).sum(axis=1, dtype=np.uint64))


def has_tag(table: pa.Table, tag: str) -> NDArray[np.bool_]:
    """Return which rows of an Arrow table with a column ``tags`` have a tag."""
    import pyarrow.compute as pc

    return is_valid(pc.map_lookup(table.column("tags"), tag, "first"))


HOLDERS = ["value", "payloads", "tags"]  # the columns of `holds_tensor`


def holds_tensor(cells: pa.Table, has_dtype: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows hold a whole tensor, not only its statistics."""
    import pyarrow.compute as pc

    has_value = numbers(pc.binary_length(cells.column("value"))) > len(NO_VALUE)
    has_payload = numbers(pc.list_value_length(cells.column("payloads"))) > 0
    return (has_value & has_dtype) | has_payload | has_tag(cells, "file")


def is_valid(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Return which cells of a column are not null."""
    return np.concatenate([np.empty(0, np.bool_), *map(valid_cells, column.chunks)])


def mean_per_step(step: Integers, rank: Integers, value: Floats) -> tuple[Integers, Floats]:
    """Return steps, and the means over ranks; of two values of a rank the later one counts."""
    last = np.append((np.diff(step) != 0) | (np.diff(rank) != 0), True)
    step, value = step[last], value[last]
    starts = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
    counts = np.diff(np.append(starts, len(step)))
    return step[starts], np.add.reduceat(value, starts) / counts


def alerts_of(cells: pa.Table) -> Iterator[tuple[tuple[int, int, int], Alert]]:
    """Yield the alerts of rows, each with (step, seq, rank)."""
    columns = [cells.column(name).to_pylist() for name in _ALERT]
    for name, step, call, seq, rank, data in zip(*columns, strict=True):
        value = decode_value(data)
        record = Record(name, Kind.ALERT, step, call, seq, rank, 1, 0, value=value)
        yield (step, seq, rank), alert_of(record)


class StoredAlerts:
    """The alerts of a table that grows; each is decoded once."""

    def __init__(self) -> None:
        self._found: list[tuple[tuple[int, int, int], Alert]] = []
        self._rows = 0  # those that were looked at

    def get(self, table: Table, rows: Integers, severity: str) -> list[Alert]:
        """Return the alerts in some rows, to which more may have come since the last call."""
        new, self._rows = rows[self._rows :], len(rows)
        new = new[np.lexsort((table.rank[new], table.values_at("seq", new), table.step[new]))]
        self._found += alerts_of(table.take(new[: _MOST_ALERTS - len(self._found)], _ALERT))
        self._found.sort(key=lambda each: each[0])
        found = [alert for _, alert in self._found if alert.severity == severity]
        if (more := len(rows) - len(self._found)) and severity == "alert":
            step, words = int(table.step[rows].max()), f"{more:,} more alerts are not shown"
            found.append(Alert("left_out", "alerts", Kind.VALUE, step, 0, "", words))
        return found


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


def exponents(table: Table, rows: Integers) -> Exponents:
    """Return the exponent counts of some rows: one column of ``counts`` for each."""
    low, counts = exponent_counts(table, rows)
    counts = counts[1:-1]
    smallest = table.column("min_abs")[rows] if table.has("min_abs") else np.zeros(len(rows))
    if table.has("max_abs"):
        largest = table.column("max_abs")[rows]
    else:  # the last nonzero bin tells it to a factor of two
        last = len(counts) - 1 - np.argmax(counts[::-1] > 0, axis=0)
        largest = np.ldexp(1.0, low + last)
    return Exponents(low, counts, smallest, largest)


def exponent_counts(
    table: Table, rows: Integers, low: int | None = None, high: int | None = None
) -> tuple[int, Integers]:
    """Return the lowest exponent and the counts of some rows; see `dense_counts`."""
    order = np.argsort(rows, kind="stable")
    return dense_counts(table.take(rows[order], ["first_bin", "bins"]), order, low, high)


def no_such(what: str, wanted: str, available: Sequence[str]) -> str:
    """Return a message about an unknown name, with similar ones or what is available.

    >>> no_such("statistic", "rm3", ["rm2", "std"])
    "no statistic is called 'rm3'; did you mean 'rm2'?"
    """
    if not available:
        return f"no {what} is called {wanted!r}: there is none at all"
    meant = "rm2" if wanted.lower() == "rms" else wanted
    similar = difflib.get_close_matches(meant, available, 3, 0.6)
    similar = similar or [each for each in available if wanted.lower() in each.lower()][:3]
    if similar:
        return f"no {what} is called {wanted!r}; did you mean {' or '.join(map(repr, similar))}?"
    few = ", ".join(available[:8]) + (f" … ({len(available)})" if len(available) > 8 else "")
    return f"no {what} is called {wanted!r}; available: {few}"
