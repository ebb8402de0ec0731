"""Match the records of two runs, and find those that are equal without reading values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.alerts.rules import ACTIVE_RULES
from tensortap.core.errors import TensortapError
from tensortap.core.patterns import TypedPattern, compile_pattern
from tensortap.core.record import Kind
from tensortap.rooms.compare.compared_run import ComparedRun, RecordPart, batch_of
from tensortap.rooms.compare.report import Difference, Key, Missing
from tensortap.rooms.compare.rules import RuleSet
from tensortap.rooms.compare.tensors import Tolerance
from tensortap.runs.arrow import scalar
from tensortap.runs.rows import HEAD_COLUMNS, NO_VALUE, records_of
from tensortap.table.numbering import codes, first_of
from tensortap.table.shard_keys import LAYOUT, PARTIAL, SHARD, tag_codes, unequal_groups
from tensortap.table.table import Table

if TYPE_CHECKING:
    import pyarrow as pa

Integers = NDArray[np.int64]
Place = tuple[str, str, int, int]  # name, kind, step, call
Groups = dict[Place, Integers]  # rows of all ranks


_TRACKED = (
    Kind.ACTIVATION, Kind.GRADIENT, Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE,
)  # fmt: skip
_PARAMETERS = {kind.value for kind in _TRACKED[2:]}
_CHUNK = 1 << 17  # pairs that are looked at together
_ABOUT_TRAINING = (Kind.ALERT.value, Kind.HEALTH.value)


class Choice(NamedTuple):
    """The user's choice of the records to compare."""

    names: str | TypedPattern | None = None
    kinds: tuple[str, ...] = ()
    steps: tuple[int | None, int | None] | None = None  # first and last, both included
    ranks: tuple[int, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()  # patterns of names of A, and replacements


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

    def parts(self, rows: Integers) -> list[RecordPart]:
        """Return the records of some rows, and the cells that hold their values."""
        cells = self.table.take(rows, [*HEAD_COLUMNS, "value", "payloads"])
        values = (cells.column(name).to_pylist() for name in ("value", "payloads"))
        return list(map(RecordPart, records_of(cells.select(HEAD_COLUMNS)), *values))

    def parts_of(self, groups: list[Integers]) -> list[list[RecordPart]]:
        """Return the parts of each group of rows; all of them are read at once."""
        parts = iter(self.parts(np.concatenate(groups)) if groups else ())
        return [list(itertools.islice(parts, len(rows))) for rows in groups]

    def rows_at(self, name: str, kind: str, step: int, call: int) -> Integers:
        """Return the rows of all ranks with a name, a kind, a step and a call."""
        table, rows = self.table, self.rows
        if name not in self.names or kind not in table.kinds:
            return rows[:0]
        rows = rows[(table.step[rows] == step) & (table.call[rows] == call)]
        matches = table.name[rows] == self.names.index(name)
        matches &= table.kind[rows] == table.kinds.index(kind)
        return np.asarray(rows[matches])

    def shards(self) -> Groups:
        """Return the rows that hold shards, by name, kind, step and call.

        Values of tensor-parallel models whose layout is unknown may be shards, too. In a program
        that runs on several devices, each device has its own calls, one after the other.
        """
        import pyarrow.compute as pc

        rows = self.rows[self.table.shard_keys().has(SHARD | LAYOUT, self.rows)]
        devices = pc.map_lookup(self.table.take(rows, ["tags"]).column("tags"), "devices", "first")
        return self.grouped(rows, [int(count or 1) for count in devices.to_pylist()])

    def grouped(self, rows: Integers, devices: Iterable[int] = ()) -> Groups:
        """Return rows by name, kind, step and call; each of several devices has its own calls."""
        groups: dict[Place, list[int]] = {}
        counts = itertools.chain(devices, itertools.repeat(1))
        for key, row, count in zip(self.keys(rows), rows.tolist(), counts, strict=False):
            groups.setdefault((key.name, key.kind, key.step, key.call // count), []).append(row)
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
        names = [renamed(name, choice.renames) for name in names]
        _check_renames(table.names, names)
    if choice.kinds:
        chosen = [kind in choice.kinds for kind in table.kinds]
    else:  # alerts and analyses are about training, not part of it
        chosen = [kind not in _ABOUT_TRAINING for kind in table.kinds]
    keep = np.array(chosen, np.bool_)[table.kind]
    if choice.names is None:  # nor is what tensortap notes for itself
        keep &= np.array([name != ACTIVE_RULES for name in table.names], np.bool_)[table.name]
    else:
        pattern: TypedPattern | re.Pattern[str] = (
            compile_pattern(choice.names) if isinstance(choice.names, str) else choice.names
        )
        keep &= np.array([bool(pattern.search(name)) for name in names], np.bool_)[table.name]
    if choice.ranks:
        keep &= np.isin(table.rank, choice.ranks)
    low, high = choice.steps or (None, None)
    if low is not None:
        keep &= table.step >= low
    if high is not None:
        keep &= table.step <= high
    return ChosenRecords(table, np.flatnonzero(keep), names)


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


class Same(NamedTuple):
    """Pairs that are equal without reading payloads, and those with nothing but statistics."""

    equal: NDArray[np.bool_]
    by_statistics: NDArray[np.bool_]


def same(a: ChosenRecords, b: ChosenRecords, pairs: Pairs, *, equal_nan: bool) -> Same:
    """Return which pairs are equal: by digest, value or statistics.

    Without `equal_nan` equal bytes may still differ, where they hold a NaN.
    """
    nothing = np.zeros(len(pairs.a), np.bool_)
    found = Same(nothing, nothing.copy())
    if not equal_nan or not len(pairs.a):
        return found
    contents = a.table.contents(), b.table.contents()
    for start in range(0, len(pairs.a), _CHUNK):  # which bounds the memory
        rows = [each[start : start + _CHUNK] for each in (pairs.a, pairs.b)]
        alike = contents[0][rows[0]] == contents[1][rows[1]]
        for whole, part in zip(found, _same_cells(a.table, b.table, rows, alike), strict=True):
            whole[start : start + _CHUNK] = part
    return found


def _same_cells(a: Table, b: Table, rows: list[Integers], alike: NDArray[np.bool_]) -> Same:
    """Return the same for some pairs; `alike` ones have the same statistics."""
    import pyarrow.compute as pc

    columns = ["digest", "dtype", "value", "payloads", "tags", "count"]
    cells = a.take(rows[0], columns), b.take(rows[1], columns)

    def equal(name: str) -> NDArray[np.bool_]:
        return np.asarray(pc.fill_null(pc.equal(*(each.column(name) for each in cells)), False))

    def absent(name: str) -> NDArray[np.bool_]:
        return np.asarray(pc.and_(*(pc.is_null(each.column(name)) for each in cells)))

    only_statistics = [_only_statistics(each) for each in cells]
    by_digest = equal("digest") & equal("dtype")
    by_value = equal("value") & absent("payloads") & ~absent("value") & ~only_statistics[0]
    tags = cells[0].column("tags").combine_chunks()
    by_value &= tag_codes(tags, "file")[0] < 0  # dumped objects are in files of their own
    by_statistics = only_statistics[0] & only_statistics[1] & alike
    told = np.asarray(pc.and_(*(pc.is_valid(each.column("digest")) for each in cells)))
    by_statistics &= ~told | by_digest  # digests tell more than statistics
    bare = by_statistics & absent("digest") & (tag_codes(tags, "devices")[0] < 0)
    return Same(by_digest | by_value | by_statistics, bare)


def equal_shards(
    a: ChosenRecords, b: ChosenRecords, pairs: Pairs, alike: NDArray[np.bool_]
) -> Pairs:
    """Return the rows of sharded parameters of which both runs have the same statistics.

    They need not become objects. `alike` pairs have the same statistics, and nothing else.
    """
    keys = a.table.shard_keys(), b.table.shard_keys()
    sharded = [key.has(SHARD | LAYOUT, each.rows) for key, each in zip(keys, (a, b), strict=True)]
    if not alike.any() or not sharded[0].any():
        return Pairs(*[a.rows[:0]] * 4)
    texts = [np.array(key.places, np.object_) for key in keys]
    kinds = np.array([kind in _PARAMETERS for kind in a.table.kinds])
    fits = alike & kinds[a.table.kind[pairs.a]]
    for key, rows in zip(keys, (pairs.a, pairs.b), strict=True):
        fits &= (key.flags[rows] & (SHARD | PARTIAL)) == SHARD
    chosen = np.flatnonzero(fits)
    places = [text[key.place[r[chosen]]] for text, key, r in zip(texts, keys, pairs, strict=False)]
    chosen = chosen[places[0] == places[1]]
    # of all rows of a tensor, and of all ranks
    table, rows = a.table, np.concatenate([pairs.a[chosen], a.rows[sharded[0]]])
    tensor = codes(table.kind[rows], table.name[rows], table.step[rows], table.call[rows])
    counts = np.bincount(tensor[len(chosen) :])
    is_whole = np.bincount(tensor[: len(chosen)], minlength=len(counts)) == counts
    tensor = tensor[: len(chosen)]
    within = codes(tensor, keys[0].place[pairs.a[chosen]])  # replicas of a shard
    differs = tensor[first_of(within)[unequal_groups(table, pairs.a[chosen], within)]]
    is_whole[differs] = False
    lone = b.table.shard_keys().has(SHARD | LAYOUT, pairs.only_b)
    more = {key.place for key in b.keys(pairs.only_b[lone])}
    for at in first_of(tensor) if more else ():
        is_whole[tensor[at]] &= a.keys(pairs.a[chosen[at : at + 1]])[0].place not in more
    chosen = chosen[is_whole[tensor]]
    return Pairs(pairs.a[chosen], pairs.b[chosen], a.rows[:0], b.rows[:0])


def _only_statistics(cells: pa.Table) -> NDArray[np.bool_]:
    """Return which rows have statistics and no value; false where the value is not yet known."""
    import pyarrow.compute as pc

    value = cells.column("value")
    nil = pc.fill_null(pc.equal(value, scalar(NO_VALUE, value.type)), False)
    return np.asarray(pc.and_(nil, pc.is_valid(cells.column("count"))))


class RecordPair(NamedTuple):
    """Two matching records."""

    key: Key
    seq: int
    a: list[RecordPart]
    b: list[RecordPart]
    tolerance: Tolerance


def _has_unknown_layout(parts: list[RecordPart], others: list[RecordPart]) -> bool:
    """Return whether it is unknown how the parts of a tensor make up the whole.

    A value of unknown layout that has the shape of the whole is one. In each of several batches,
    values of unknown layout with equal statistics are replicas.
    """
    shard, shape = others[0].record.shard, others[0].record.shape
    if shard is not None:
        shape = shard.global_shape
    layouts = [(part.record.tags.get("placements", ""), part.record) for part in parts]
    if any("P" in layout for layout, _ in layouts):
        return True
    unknown = [record for layout, record in layouts if layout == "?" and record.shape != shape]
    batches = {batch_of(record) for record in unknown}
    contents = {(batch_of(record), repr(record.stats)) for record in unknown}
    return bool(unknown) and (len(batches) < 2 or len(contents) > len(batches))


def _by_batch(parts: list[RecordPart]) -> dict[Any, list[RecordPart]]:
    found: dict[Any, list[RecordPart]] = {}
    for part in parts:
        found.setdefault(batch_of(part.record), []).append(part)
    return found


def _without_copies(parts: list[RecordPart], others: list[RecordPart]) -> list[RecordPart]:
    """Return the parts of one rank if all ranks have the same, and the other run has no more.

    Such an output has no batch dimension: position embeddings, for example.
    """

    def content(part: RecordPart) -> Any:
        record = part.record
        offsets = record.shard and record.shard.offsets
        return record.shape, offsets, record.digest, repr(record.stats)

    batches = list(_by_batch(parts).values())
    first = [content(part) for part in batches[0]]
    same = all([content(part) for part in batch] == first for batch in batches[1:])
    seen = all(part.record.stats is not None for part in parts)
    shapes = {part.record.shape for part in others}
    return batches[0] if same and seen and first[0][0] in shapes else parts


def _without(records: ChosenRecords, *groups: Integers) -> ChosenRecords:
    """Return the records without some rows."""
    rows = np.concatenate([records.rows[:0], *groups])
    return records._replace(rows=np.setdiff1d(records.rows, rows, assume_unique=True))


class Plan:
    """The pairs of two runs, and what is known about them without reading values."""

    def __init__(
        self,
        records: tuple[ChosenRecords, ChosenRecords],
        tolerance: Tolerance,
        rules: RuleSet,
    ) -> None:
        self.records = records
        # each rank counts its own records, so the run with fewer ranks tells the order better
        ranks = [len(each.table.ranks()) for each in records]
        self.ordered_by = int(ranks[1] < ranks[0])
        self._tolerance = tolerance
        self._rules = rules
        self.ignored = 0
        # one of them may have been recorded without initial weights, which are of step -1
        self._has_initial = [bool((each.table.step[each.rows] < 0).any()) for each in records]
        self.items: list[RecordPair] = []
        self._lone: list[tuple[Key, str]] = []
        pairs = pair(*records)
        found = same(*records, pairs, equal_nan=tolerance.equal_nan)
        known = equal_shards(*records, pairs, found.by_statistics)
        self._count_equal_shards(known)
        # row of the first run → the row of the second one that is equal without reading payloads
        self._equal_to = np.full(len(records[0].table), -1)
        self._equal_to[pairs.a[found.equal]] = pairs.b[found.equal]
        rest = [_without(each, rows) for each, rows in zip(records, known, strict=False)]
        shards = [each.shards() for each in rest]
        groups = {
            at: [
                group[at] if at in group else each.rows_at(*at)
                for each, group in zip(rest, shards, strict=True)
            ]
            for at in {**shards[0], **shards[1]}
        }
        for at in self._same_unknown(groups):
            del groups[at]
        groups |= self._on_other_ranks(rest, shards)
        self.unplaced: list[Key] = []
        self._pair_sharded(groups)
        a, b = (
            _without(each, *(group[i] for group in groups.values())) for i, each in enumerate(rest)
        )
        if len(known.a) or groups:
            pairs = pair(a, b)
        self._pair_plain(a, b, pairs)
        self.items.sort(key=lambda item: (item.key.step, item.seq, item.key.rank))
        self.by_key = {item.key: item for item in self.items}
        self.compared = self.equal + self.equal_shards + len(self.items)

    def _count_equal_shards(self, known: Pairs) -> None:
        """Count tensors as if they were compared by statistics; `shard_rows` have their order."""
        rows = known[self.ordered_by]
        chosen = self.records[self.ordered_by]
        table = chosen.table
        rows = rows[np.argsort(table.rank[rows], kind="stable")]
        place = table.kind[rows], table.name[rows], table.step[rows], table.call[rows]
        rows = rows[first_of(codes(*place))]
        is_ignored = [
            [self._rules.find(name, kind).ignore for name in chosen.names] for kind in table.kinds
        ]
        ignored = (
            np.array(is_ignored)[table.kind[rows], table.name[rows]] if len(rows) else rows > 0
        )
        self.shard_rows = rows[~ignored]
        self.ignored += int(ignored.sum())
        self.equal_shards = len(self.shard_rows)

    def _same_unknown(self, groups: dict[Place, list[Any]]) -> set[Place]:
        """Return where both runs have values of unknown layout on the same ranks."""
        ranks = [each.table.rank for each in self.records]
        same = [at for at, (a, b) in groups.items() if np.array_equal(ranks[0][a], ranks[1][b])]
        unknown = set(same)
        for i, each in enumerate(self.records if same else ()):
            rows = [groups[at][i] for at in same]
            cells = each.table.take(np.concatenate(rows), ["shard_shape"])
            known = iter(cells.column("shard_shape").is_valid().to_pylist())
            unknown -= {at for at, own in zip(same, rows, strict=True)
                        if any(list(itertools.islice(known, len(own))))}  # fmt: skip
        return unknown

    def _pair_plain(self, a: ChosenRecords, b: ChosenRecords, pairs: Pairs) -> None:
        equal = self._equal_to[pairs.a] == pairs.b
        self.equal = int(equal.sum())
        ordered = (a.table, pairs.a), (b.table, pairs.b)
        table, in_order = ordered[self.ordered_by]
        self.equal_rows = in_order[equal]
        rows, seq = pairs.a[~equal], table.seq[in_order[~equal]].tolist()
        found = a.keys(rows), seq, a.parts(rows), b.parts(pairs.b[~equal])
        for key, seq, one, other in zip(*found, strict=True):
            self._add(key, seq, [one], [other])
        for each, lone, side in ((a, pairs.only_a, "a"), (b, pairs.only_b, "b")):
            for key in each.keys(lone):
                self._lose(key, side)

    def _pair_sharded(self, groups: dict[Place, list[Any]]) -> None:
        for at, (rows_a, rows_b) in groups.items():
            if not len(rows_a) or not len(rows_b):
                self._lose(Key(*at, -1), "a" if len(rows_a) else "b")
        a, b = self.records
        both = {at: rows for at, rows in groups.items() if all(map(len, rows))}
        found = (a.parts_of([rows[0] for rows in both.values()]),
                 b.parts_of([rows[1] for rows in both.values()]))  # fmt: skip
        for (at, (rows_a, rows_b)), *parts in zip(both.items(), *found, strict=True):
            key = Key(*at, -1)
            if _has_unknown_layout(*parts) or _has_unknown_layout(*parts[::-1]):
                self.unplaced.append(key)
                continue
            table, rows = ((a.table, rows_a), (b.table, rows_b))[self.ordered_by]
            seq = int(table.seq[rows[np.argmin(table.rank[rows])]])
            parts = [_without_copies(*parts), _without_copies(*parts[::-1])]
            batches = [_by_batch(each) for each in parts]
            if len(batches[0]) < 2 or batches[0].keys() != batches[1].keys():
                self._add(key, seq, *parts)
                continue
            for batch, own in batches[0].items():  # the same batches: each is compared by itself
                self._add(Key(*at, own[0].record.rank), seq, own, batches[1][batch])

    def _on_other_ranks(
        self, rest: list[ChosenRecords], shards: list[Groups]
    ) -> dict[Place, list[Any]]:
        """Return the rows of tensors that the runs have on different ranks, without shards."""
        a, b = self.records
        if a.table.ranks() == b.table.ranks():
            return {}
        found = []
        for each, known in zip(rest, shards, strict=True):
            sharded = np.concatenate([[-1], *known.values()])
            kinds = [i for i, kind in enumerate(each.table.kinds) if kind in _TRACKED]
            rows = each.rows[np.isin(each.table.kind[each.rows], kinds)]
            found.append(each.grouped(rows[np.isin(rows, sharded, invert=True)]))
        both = {at: [found[0][at], found[1][at]] for at in found[0] if at in found[1]}
        return {
            at: rows for at, rows in both.items()
            if set(a.table.rank[rows[0]]) != set(b.table.rank[rows[1]])
        }  # fmt: skip

    def _add(self, key: Key, seq: int, a: list[RecordPart], b: list[RecordPart]) -> None:
        rule = self._rules.find(key.name, key.kind)
        if rule.ignore:
            self.ignored += 1
            return
        self.items.append(RecordPair(key, seq, a, b, self._tolerance.given(rule.atol, rule.rtol)))

    def _lose(self, key: Key, side: str) -> None:
        rule = self._rules.find(key.name, key.kind)
        if rule.ignore or rule.expected or (key.step < 0 and not all(self._has_initial)):
            self.ignored += 1
            return
        self._lone.append((key, side))

    def order(self, difference: Difference) -> tuple[int, int, int]:
        """Return the position of a difference in the execution of the first run."""
        key = difference.key
        return key.step, self.by_key[key].seq, key.rank

    def missing(self, sides: tuple[ComparedRun, ComparedRun]) -> Iterator[Missing]:
        """Return the records that only one run has, and whether the other dropped them."""
        if not self._lone:
            return
        dropped = [
            set(side.reader.missing()) if hasattr(side.reader, "missing") else set()
            for side in sides
        ]
        for key, side in sorted(self._lone, key=lambda lone: (lone[0].step, lone[0].name)):
            other = dropped[1] if side == "a" else dropped[0]
            yield Missing(key, side, (key.name, key.step, key.rank) in other)
