"""Match the records of two runs, and find those that are equal without reading values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.compare.compared_run import RecordPart
from tensortap.compare.report import Captures, Key
from tensortap.errors import TensortapError
from tensortap.record import Kind
from tensortap.runs.arrow import scalar
from tensortap.runs.rows import HEAD_COLUMNS, NO_VALUE, STATISTICS, records_of
from tensortap.select import name_pattern
from tensortap.table.table import Table, has_tag

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]


class Choice(NamedTuple):
    """Which records of two runs are compared."""

    names: str | None = None
    kinds: tuple[str, ...] = ()
    steps: tuple[int | None, int | None] | None = None  # first and last, both included
    ranks: tuple[int, ...] = ()
    renames: tuple[
        tuple[str, str], ...
    ] = ()  # (pattern, replacement) from names of A to names of B


class Pairs(NamedTuple):
    """Rows of two tables: matching ones side by side, and those of one run only."""

    a: Integers
    b: Integers
    only_a: Integers
    only_b: Integers


class ChosenRecords(NamedTuple):
    """The records of one run that are compared."""

    table: Table
    rows: Integers
    names: list[str]  # by code of `table.name`, as the other run spells them

    def keys(self, rows: Integers) -> list[Key]:
        """Return what identifies each of some rows."""
        table = self.table
        integers = (column[rows].tolist() for column in (table.step, table.call, table.rank))
        return [
            Key(self.names[name], table.kinds[kind], *rest)
            for name, kind, *rest in zip(table.name[rows], table.kind[rows], *integers, strict=True)
        ]

    def captures(self, rows: Integers) -> Captures:
        """Return when the records of some rows were captured."""
        table = self.table
        codes = table.name[rows], table.kind[rows]
        return Captures(self.names, table.kinds, *codes, table.step[rows], table.seq[rows])

    def parts(self, rows: Integers) -> list[RecordPart]:
        """Return the records of some rows, and the cells that hold their values."""
        cells = self.table.take(rows, [*HEAD_COLUMNS, "value", "payloads"])
        values = (cells.column(name).to_pylist() for name in ("value", "payloads"))
        return list(map(RecordPart, records_of(cells.select(HEAD_COLUMNS)), *values))

    def rows_at(self, name: str, kind: str, step: int, call: int) -> Integers:
        """Return the rows of all ranks with a name, a kind, a step and a call."""
        table, rows = self.table, self.rows
        if name not in self.names or kind not in table.kinds:
            return rows[:0]
        rows = rows[(table.step[rows] == step) & (table.call[rows] == call)]
        matches = table.name[rows] == self.names.index(name)
        matches &= table.kind[rows] == table.kinds.index(kind)
        return np.asarray(rows[matches])

    def shards(self) -> dict[tuple[str, str, int, int], Integers]:
        """Return the rows that hold shards, by name, kind, step and call."""
        import pyarrow.compute as pc

        shapes = self.table.take(self.rows, ["shard_shape"]).column("shard_shape")
        rows = self.rows[np.asarray(pc.is_valid(shapes))]
        groups: dict[tuple[str, str, int, int], list[int]] = {}
        for key, row in zip(self.keys(rows), rows.tolist(), strict=True):
            groups.setdefault((key.name, key.kind, key.step, key.call), []).append(row)
        return {key: np.array(group) for key, group in groups.items()}


def parse_mapping(text: str) -> tuple[str, str]:
    r"""Return the pattern and the replacement of ``old\.(.*)=new.\1``.

    >>> parse_mapping(r"h\.(\d+)=blocks.\1")
    ('h\\.(\\d+)', 'blocks.\\1')
    """
    pattern, found, replacement = text.partition("=")
    if not found or not pattern:
        raise TensortapError(f"mapping must look like 'pattern=replacement', got {text!r}")
    try:
        re.compile(pattern)
        re.sub(pattern, replacement, "")
    except (re.error, IndexError) as error:
        raise TensortapError(f"mapping {text!r} is invalid: {error}") from None
    return pattern, replacement


def choose(table: Table, choice: Choice, *, rename: bool) -> ChosenRecords:
    """Return the records that are to be compared; `rename` spells names as the other run does."""
    names = table.names
    if rename and choice.renames:
        names = [_renamed(name, choice.renames) for name in names]
        _check_renames(table.names, names)
    if choice.kinds:
        chosen = [kind in choice.kinds for kind in table.kinds]
    else:  # alerts are about training, not part of it
        chosen = [kind != Kind.ALERT.value for kind in table.kinds]
    keep = np.array(chosen, np.bool_)[table.kind]
    if choice.names is not None:
        pattern = name_pattern(choice.names)
        keep &= np.array([bool(pattern.search(name)) for name in names], np.bool_)[table.name]
    if choice.ranks:
        keep &= np.isin(table.rank, choice.ranks)
    low, high = choice.steps or (None, None)
    if low is not None:
        keep &= table.step >= low
    if high is not None:
        keep &= table.step <= high
    return ChosenRecords(table, np.flatnonzero(keep), names)


def _renamed(name: str, renames: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def _check_renames(before: list[str], after: list[str]) -> None:
    seen: dict[str, str] = {}
    for old, new in zip(before, after, strict=True):
        other = seen.setdefault(new, old)
        if other != old:
            raise TensortapError(f"the mapping gives both {other!r} and {old!r} the name {new!r}")


def pair(a: ChosenRecords, b: ChosenRecords) -> Pairs:
    """Match the rows by name, kind, step, call and rank."""
    codes: dict[str, int] = {}
    left, right = _key_columns(a, codes), _key_columns(b, codes)
    if all(map(np.array_equal, left, right)):  # the same program: row by row
        return Pairs(a.rows, b.rows, a.rows[:0], b.rows[:0])
    import pyarrow as pa

    keys = [str(i) for i in range(len(left))]
    joined = pa.table([*left, a.rows], [*keys, "a"]).join(
        pa.table([*right, b.rows], [*keys, "b"]), keys, join_type="full outer"
    )
    rows_a, rows_b = (np.asarray(joined.column(name).fill_null(-1)) for name in "ab")
    both = (rows_a >= 0) & (rows_b >= 0)
    return Pairs(rows_a[both], rows_b[both], rows_a[rows_b < 0], rows_b[rows_a < 0])


def _key_columns(records: ChosenRecords, codes: dict[str, int]) -> list[NDArray[Any]]:
    """Return the columns of the key as integers; `codes` numbers the texts of both runs."""
    table, rows = records.table, records.rows
    columns = [table.step[rows], table.call[rows], table.rank[rows]]
    for texts, column in ((records.names, table.name), (table.kinds, table.kind)):
        shared = np.array([codes.setdefault(text, len(codes)) for text in texts], np.int64)
        columns.append(shared[column[rows]])
    return columns


def same(a: ChosenRecords, b: ChosenRecords, pairs: Pairs, *, equal_nan: bool) -> NDArray[np.bool_]:
    """Return which pairs are equal without reading payloads: by digest, value or statistics.

    Without `equal_nan` equal bytes may still differ, where they hold a NaN.
    """
    import pyarrow.compute as pc

    if not equal_nan or not len(pairs.a):
        return np.zeros(len(pairs.a), np.bool_)
    columns = ["digest", "dtype", "value", "payloads", "tags", "count"]
    cells = a.table.take(pairs.a, columns), b.table.take(pairs.b, columns)

    def equal(name: str) -> NDArray[np.bool_]:
        return np.asarray(pc.fill_null(pc.equal(*(each.column(name) for each in cells)), False))

    def absent(name: str) -> NDArray[np.bool_]:
        return np.asarray(pc.and_(*(pc.is_null(each.column(name)) for each in cells)))

    only_statistics = [_only_statistics(each) for each in cells]
    by_digest = equal("digest") & equal("dtype")
    by_value = equal("value") & absent("payloads") & ~absent("value") & ~only_statistics[0]
    by_value &= ~has_tag(cells[0], "file")  # dumped objects are in files of their own
    by_statistics = only_statistics[0] & only_statistics[1]
    for name in STATISTICS if by_statistics.any() else ():
        one, other = a.table.column(name)[pairs.a], b.table.column(name)[pairs.b]
        by_statistics &= (one == other) | (np.isnan(one) & np.isnan(other))
    return by_digest | by_value | by_statistics


def _only_statistics(cells: pa.Table) -> NDArray[np.bool_]:
    """Return which rows have statistics and no value; false where the value is not yet known."""
    import pyarrow.compute as pc

    value = cells.column("value")
    nil = pc.fill_null(pc.equal(value, scalar(NO_VALUE, value.type)), False)
    return np.asarray(pc.and_(nil, pc.is_valid(cells.column("count"))))
