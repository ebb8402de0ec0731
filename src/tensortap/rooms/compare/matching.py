"""Match the records of two runs, and find those that are equal without reading values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.alerts.rules import ACTIVE_RULES
from tensortap.core.errors import TensortapError
from tensortap.core.patterns import TypedPattern, compile_pattern
from tensortap.core.record import Kind
from tensortap.rooms.compare.compared_run import RecordPart
from tensortap.rooms.compare.report import Key
from tensortap.runs.arrow import coded, lists, numbers, scalar
from tensortap.runs.rows import HEAD_COLUMNS, NO_VALUE, STATISTICS, records_of, schema
from tensortap.table.columns import is_valid
from tensortap.table.numbering import codes
from tensortap.table.shard_keys import LAYOUT, PARTIAL, SHARD, tag_codes
from tensortap.table.table import Table

if TYPE_CHECKING:
    import pyarrow as pa

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

FILE = 8  # flag of rows, beside those of shards: the value is in a dumped file
_BINS = ("first_bin", "bins")
_TOGETHER = 1 << 17  # pairs whose cells are in memory at a time
_ABOUT_TRAINING = (Kind.ALERT.value, Kind.HEALTH.value)


class Choice(NamedTuple):
    """The records to compare."""

    names: str | TypedPattern | None = None
    kinds: tuple[str, ...] = ()
    steps: tuple[int | None, int | None] | None = None  # first and last, both included
    ranks: tuple[int, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()  # patterns of names of A, and replacements
    tensors: frozenset[tuple[str, str]] | None = None  # kinds and names of B; None: all


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

    def parts(self, rows: Integers) -> list[RecordPart]:
        """Return the records of some rows, and the cells that hold their values."""
        import pyarrow as pa

        heads = [name for name in HEAD_COLUMNS if name not in _BINS]  # they take the longest
        cells = self.table.take(rows, [*heads, "value", "payloads"])
        values = (cells.column(name).to_pylist() for name in ("value", "payloads"))
        for name in _BINS:
            cells = cells.append_column(name, pa.nulls(len(rows), schema().field(name).type))
        return list(map(RecordPart, records_of(cells.select(HEAD_COLUMNS)), *values))


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
        names = [renamed(name, choice.renames) for name in names]
        _check_renames(table.names, names)
    wanted = wanted_tensors(choice, table.kinds, names)
    is_wanted = [[(kind, name) in wanted for name in names] for kind in table.kinds]
    keep = np.array(is_wanted, np.bool_).reshape(-1, len(names))[table.kind, table.name]
    if choice.ranks:
        keep &= np.isin(table.rank, choice.ranks)
    low, high = choice.steps or (None, None)
    if low is not None:
        keep &= table.step >= low
    if high is not None:
        keep &= table.step <= high
    return ChosenRecords(table, np.flatnonzero(keep), names)


def wanted_tensors(
    choice: Choice, kinds: Iterable[str], names: Iterable[str]
) -> frozenset[tuple[str, str]]:
    """Return the kinds and names that are to be compared.

    Unless they are named: alerts and analyses are about training, not part of it, nor is what
    tensortap notes for itself.
    """
    if choice.kinds:
        kinds = [kind for kind in kinds if kind in choice.kinds]
    else:
        kinds = [kind for kind in kinds if kind not in _ABOUT_TRAINING]
    if choice.names is None:
        names = [name for name in names if name != ACTIVE_RULES]
    else:
        given: Any = choice.names
        pattern = compile_pattern(given) if isinstance(given, str) else given
        names = [name for name in names if pattern.search(name)]
    found = frozenset((kind, name) for kind in kinds for name in names)
    return found if choice.tensors is None else found & choice.tensors


def renamed(name: str, renames: Iterable[tuple[str, str]]) -> str:
    """Return a name of the first run as the second run spells it."""
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def _check_renames(before: list[str], after: list[str]) -> None:
    seen: dict[str, str] = {}
    for old, new in zip(before, after, strict=True):
        other = seen.setdefault(new, old)
        if other != old:
            raise TensortapError(f"the mapping gives both {other!r} and {old!r} the name {new!r}")


# -- pairs -----------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """Rows of two tables: matching ones side by side, as A has them; those of one run only."""

    a: Integers
    b: Integers
    only_a: Integers
    only_b: Integers

    def without(self, gone_a: Booleans, gone_b: Booleans) -> tuple[Pairs, Booleans]:
        """Return the pairs without some rows of each table, and which of the pairs are left."""
        left_a, left_b = ~gone_a[self.a], ~gone_b[self.b]
        both = left_a & left_b
        only_a = [self.only_a[~gone_a[self.only_a]], self.a[left_a & ~both]]
        only_b = [self.only_b[~gone_b[self.only_b]], self.b[left_b & ~both]]
        pairs = Pairs(self.a[both], self.b[both], np.concatenate(only_a), np.concatenate(only_b))
        return pairs, both


def pair(a: ChosenRecords, b: ChosenRecords) -> Pairs:
    """Match the rows by name, kind, step, call and rank."""
    left, right = ([*tensor, each.table.rank[each.rows]] for each, tensor in _keys(a, b))
    if all(map(np.array_equal, left, right)):  # the same program: row by row
        return Pairs(a.rows, b.rows, a.rows[:0], b.rows[:0])
    import pyarrow as pa

    keys = [str(i) for i in range(len(left))]
    joined = pa.table([*left, a.rows], [*keys, "a"]).join(
        pa.table([*right, b.rows], [*keys, "b"]), keys, join_type="full outer"
    )
    rows_a, rows_b = (numbers(joined.column(name).fill_null(-1)) for name in "ab")
    both = np.flatnonzero((rows_a >= 0) & (rows_b >= 0))
    both = both[np.argsort(rows_a[both])]
    return Pairs(rows_a[both], rows_b[both], rows_a[rows_b < 0], rows_b[rows_a < 0])


def _keys(*runs: ChosenRecords) -> Iterator[tuple[ChosenRecords, list[NDArray[Any]]]]:
    """Yield name, kind, step and call of each run's rows; texts have the same numbers in both."""
    known: dict[str, int] = {}
    for each in runs:
        table, rows = each.table, each.rows
        columns: list[NDArray[Any]] = [table.step[rows], table.call[rows]]
        for texts, column in ((each.names, table.name), (table.kinds, table.kind)):
            shared = np.array([known.setdefault(text, len(known)) for text in texts], np.int32)
            columns.append(shared[column[rows]])
        yield each, columns


def tensor_numbers(
    a: ChosenRecords, b: ChosenRecords, devices: tuple[Integers, Integers]
) -> list[Integers]:
    """Return for each table the tensors that its rows are of, numbered for both; -1: not chosen.

    In a program that runs on several devices, each device has its own calls of a tensor.
    """
    columns = []
    for (each, tensor), many in zip(_keys(a, b), devices, strict=True):
        tensor[1] = tensor[1] // many[each.rows]
        columns.append(tensor)
    found = codes(*map(np.concatenate, zip(*columns, strict=True)))
    numbered = []
    for each, own in zip((a, b), np.split(found, [len(a.rows)]), strict=True):
        of_rows = np.full(len(each.table), -1)
        of_rows[each.rows] = own
        numbered.append(of_rows)
    return numbered


# -- what is known without values ------------------------------------------------------------


class RowLayout(NamedTuple):
    """Flags and devices of a table's shards, one entry per row."""

    flags: NDArray[np.uint8]
    devices: Integers  # of one program, each with a shard of the tensor

    def has(self, flag: int, rows: Integers) -> Booleans:
        """Return which rows have a flag."""
        return (self.flags[rows] & flag) > 0

    def is_placed(self, rows: Integers) -> Booleans:
        """Return which rows are a known part of the whole."""
        return np.asarray((self.flags[rows] & (SHARD | PARTIAL)) == SHARD)


def layout_of(table: Table) -> RowLayout:
    """Return which rows are shards, may be shards, are partial sums, or are in files."""
    import pyarrow.compute as pc

    flags, devices = [np.empty(0, np.uint8)], [np.empty(0, np.int64)]
    for cells in table.read(["shard_offsets", "shard_placements", "tags"]):
        tags = cells.column("tags").combine_chunks()
        layout, file, many, texts = tag_codes(tags, "placements", "file", "devices")
        found = LAYOUT * (layout >= 0) + FILE * (file >= 0)
        is_shard = is_valid(cells.column("shard_offsets"))
        if is_shard.any():
            code, words = coded(pc.binary_join(cells.column("shard_placements"), " "))
            is_partial = np.array(["P" in word for word in words], np.bool_)[code]
            found += SHARD * is_shard + PARTIAL * is_partial
        flags.append(found.astype(np.uint8))
        is_split = (found & (SHARD | LAYOUT)) > 0
        counts = np.array([int(text) if text.isdigit() else 1 for text in texts])
        devices.append(np.where(is_split & (many >= 0), np.maximum(counts[many], 1), 1))
    return RowLayout(np.concatenate(flags), np.concatenate(devices))


class Known(NamedTuple):
    """Facts about pairs that need no payloads, one entry per pair."""

    equal: Booleans  # by digest, value or statistics
    bare: Booleans  # equal, and nothing but statistics says so
    in_place: Booleans  # both are the same part of the whole


def known_pairs(
    a: ChosenRecords, b: ChosenRecords, pairs: Pairs, layouts: list[RowLayout], *, equal_nan: bool
) -> Known:
    """Return which pairs are equal.

    Without `equal_nan` equal bytes may still differ, where they hold a NaN.
    """
    known = Known(*(np.zeros(len(pairs.a), np.bool_) for _ in Known._fields))
    for some in a.table.slices(pairs.a, _TOGETHER) if equal_nan else ():
        rows = pairs.a[some], pairs.b[some]
        found = _known_cells(a.table, b.table, *rows, layouts)
        for whole, part in zip(known, found, strict=True):
            whole[some] = part
    return known


def _known_cells(a: Table, b: Table, rows_a: Integers, rows_b: Integers, layouts: Any) -> Known:
    import pyarrow.compute as pc

    shards = layouts[0].is_placed(rows_a) & layouts[1].is_placed(rows_b)
    places = ["shape", "shard_offsets"] if shards.any() else []
    columns = ["digest", "value", "payloads", "count", *places]
    cells = a.take(rows_a, columns), b.take(rows_b, columns)

    def equal(name: str) -> Booleans:
        return _bools(pc.equal(*(each.column(name) for each in cells)))

    def valid(name: str) -> list[Booleans]:
        return [is_valid(each.column(name)) for each in cells]

    only_statistics = [only_has_statistics(each) for each in cells]
    alike = only_statistics[0] & only_statistics[1]
    if alike.any():
        rows = rows_a[alike], rows_b[alike]
        two = a.take(rows[0], list(STATISTICS)), b.take(rows[1], list(STATISTICS))
        alike[alike] = np.logical_and.reduce(
            [_same_bits(*(each.column(name) for each in two)) for name in STATISTICS]
        )
    digests, values, payloads = valid("digest"), valid("value"), valid("payloads")
    dtypes = [np.array(each.dtypes, np.object_) for each in (a, b)]
    same_dtype = dtypes[0][:, None] == dtypes[1]
    by_digest = equal("digest") & same_dtype[a.dtype[rows_a], b.dtype[rows_b]]
    by_value = equal("value") & ~(payloads[0] | payloads[1]) & values[0] & ~only_statistics[0]
    by_value &= ~layouts[0].has(FILE, rows_a)  # dumped objects are in files of their own
    # digests tell more than statistics
    by_statistics = alike & (~(digests[0] & digests[1]) | by_digest)
    for name in places:
        shards &= _same_lists(*(each.column(name) for each in cells))
    bare = by_statistics & ~(digests[0] | digests[1])
    return Known(by_digest | by_value | by_statistics, bare, shards)


def _same_bits(one: pa.ChunkedArray, other: pa.ChunkedArray) -> Booleans:
    """Return which numbers of two columns have the same bits; null is NaN."""
    x, y = (numbers(each) for each in (one, other))
    if x.dtype != y.dtype:  # one of them has nulls
        x, y = x.astype(np.float64), y.astype(np.float64)
    return np.asarray(x.view(np.int64) == y.view(np.int64))


def _same_lists(one: pa.ChunkedArray, other: pa.ChunkedArray) -> Booleans:
    """Return which lists of integers of two columns are equal."""
    (sizes, items), (others, other_items) = lists(one), lists(other)
    same = sizes == others
    row = np.repeat(np.arange(len(sizes)), np.where(same, sizes, 0))
    differs = items[np.repeat(same, sizes)] != other_items[np.repeat(same, others)]
    same[row[differs]] = False
    return np.asarray(same)


def only_has_statistics(cells: pa.Table) -> Booleans:
    """Return which rows have statistics and no value; false where the value is not yet known."""
    import pyarrow.compute as pc

    value = cells.column("value")
    nil = _bools(pc.equal(value, scalar(NO_VALUE, value.type)))
    return nil & is_valid(cells.column("count"))


def _bools(cells: pa.ChunkedArray) -> Booleans:
    """Return bools as an array, null as false; `numpy.asarray` would import pandas."""
    import pyarrow.compute as pc

    found = numbers(pc.fill_null(cells, False).cast("uint8"))
    return found.view(np.bool_)
