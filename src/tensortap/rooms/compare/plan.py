"""The pairs of two runs that are compared: records, and tensors that ranks have parts of.

Only what may differ becomes an object. Tensors of which both runs have equal parts are counted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tensortap.core.record import Kind
from tensortap.rooms.compare.compared_run import RecordPart, batch_of
from tensortap.rooms.compare.matching import (
    Booleans,
    ChosenRecords,
    Integers,
    Known,
    Pairs,
    RowLayout,
    known_pairs,
    layout_of,
    only_has_statistics,
    pair,
    tensor_numbers,
)
from tensortap.rooms.compare.report import Key
from tensortap.rooms.compare.rules import RuleSet
from tensortap.rooms.compare.tensors import Tolerance
from tensortap.runs.arrow import numbers
from tensortap.runs.rows import STATISTICS
from tensortap.table.columns import digest_bits, mixed
from tensortap.table.numbering import codes, first_of
from tensortap.table.shard_keys import LAYOUT, SHARD, ShardKeys

_BATCHED = (Kind.ACTIVATION.value, Kind.GRADIENT.value)
_TRACKED = (
    *_BATCHED, Kind.WEIGHT.value, Kind.WEIGHT_GRADIENT.value, Kind.OPTIMISER_STATE.value
)  # fmt: skip


class RecordPair(NamedTuple):
    """Two matching records, or tensors of which ranks have parts."""

    key: Key
    seq: int
    a: list[RecordPart]
    b: list[RecordPart]
    tolerance: Tolerance

    @property
    def order(self) -> tuple[int, int, int]:
        """The position in the order of execution."""
        return self.key.step, self.seq, self.key.rank


class Plan:
    """The pairs of two runs, and what is known about them without reading values."""

    def __init__(
        self,
        records: tuple[ChosenRecords, ChosenRecords],
        ranks: tuple[list[int], list[int]],
        tolerance: Tolerance,
        rules: RuleSet,
    ) -> None:
        """`ranks` are those of the whole runs."""
        self.records = records
        self._ranks = ranks
        # each rank counts its own records, so the run with fewer ranks tells the order better
        self.ordered_by = int(len(ranks[1]) < len(ranks[0]))
        self._tolerance = tolerance
        self._rules = rules
        self.items: list[RecordPair] = []
        self.lone: list[tuple[Key, str]] = []  # records of one run, and which
        self.unplaced: list[Key] = []
        self.equal = self.equal_shards = self.by_statistics = self.ignored = 0
        self.equal_rows: list[Integers] = []  # of the run that tells the order
        pairs = pair(*records)
        layouts = [layout_of(each.table) for each in records]
        known = known_pairs(*records, pairs, layouts, equal_nan=tolerance.equal_nan)
        pairs, left = pairs.without(*self._pair_sharded(pairs, known, layouts))
        self._pair_plain(pairs, known.equal[left])
        self.items.sort(key=lambda item: item.order)

    # -- tensors of which ranks have parts -------------------------------------------------------

    def _pair_sharded(self, pairs: Pairs, known: Known, layouts: list[RowLayout]) -> list[Booleans]:
        """Pair tensors whose parts are on several ranks; return the rows that they consist of."""
        a, b = self.records
        split = [
            each.rows[layout.has(SHARD | LAYOUT, each.rows)]
            for each, layout in zip(self.records, layouts, strict=True)
        ]
        if not len(split[0]) and not len(split[1]) and self._ranks[0] == self._ranks[1]:
            return [np.zeros(len(each.table), np.bool_) for each in self.records]
        tensors = tensor_numbers(a, b, (layouts[0].devices, layouts[1].devices))
        count = 1 + max(int(of_rows.max(initial=-1)) for of_rows in tensors)

        def of_rows(side: int, rows: Integers) -> Booleans:
            """Return which tensors have any of these rows."""
            found = np.zeros(count, np.bool_)
            found[tensors[side][rows]] = True
            return found

        apart = of_rows(0, pairs.only_a) | of_rows(1, pairs.only_b)
        placed = [s[layout.has(SHARD, s)] for s, layout in zip(split, layouts, strict=True)]
        # values of unknown layout on the same ranks are compared rank by rank
        sharded = of_rows(0, split[0]) | of_rows(1, split[1])
        sharded &= of_rows(0, placed[0]) | of_rows(1, placed[1]) | apart
        if self._ranks[0] != self._ranks[1]:
            kinds = np.array([kind in _TRACKED for kind in a.table.kinds], np.bool_)
            tracked = a.rows[kinds[a.table.kind[a.rows]]] if len(a.rows) else a.rows
            sharded |= of_rows(0, tracked) & of_rows(1, b.rows) & apart
        fits = known.equal & known.in_place
        differs = sharded & (apart | of_rows(0, pairs.a[~fits]))
        same = sharded & ~differs
        self._count_equal(pairs, known, same[tensors[0][pairs.a]], tensors[0])
        self._pair_groups(np.flatnonzero(differs), tensors)
        # rows that are not chosen have the number -1
        return [np.append(sharded, False)[of_rows] for of_rows in tensors]

    def _count_equal(self, pairs: Pairs, known: Known, chosen: Booleans, tensors: Integers) -> None:
        """Count tensors of which both runs have equal parts; each batch counts."""
        rows = pairs[self.ordered_by][chosen]
        if not len(rows):
            return
        records = self.records[self.ordered_by]
        table, tensor = records.table, tensors[pairs.a[chosen]]
        batch = np.zeros(len(rows), np.int64)
        batched = np.flatnonzero(_has_kind(records, rows, _BATCHED))
        if len(batched):
            batch[batched] = _batches(table.take(rows[batched], [*ShardKeys.columns]),
                                      table.rank[rows[batched]])  # fmt: skip
        tensor = codes(tensor, batch)
        order = np.lexsort((table.rank[rows], tensor))
        first = order[first_of(tensor[order])]
        bare = np.ones(len(first), np.bool_)
        bare[tensor[~known.bare[chosen]]] = False
        ignored = self._is_ignored(records, rows[first])
        self.ignored += int(ignored.sum())
        self.equal_shards += int((~ignored).sum())
        self.by_statistics += int((bare & ~ignored).sum())
        self.equal_rows.append(rows[first[~ignored]])

    def _is_ignored(self, records: ChosenRecords, rows: Integers) -> Booleans:
        table = records.table
        ignored = [[self._rules.find(name, kind).ignore for name in records.names]
                   for kind in table.kinds]  # fmt: skip
        return np.array(ignored, np.bool_)[table.kind[rows], table.name[rows]]

    def _pair_groups(self, chosen: Integers, tensors: list[Integers]) -> None:
        """Pair tensors that may differ, each with all its parts."""
        if not len(chosen):
            return
        groups = []
        for each, of_rows in zip(self.records, tensors, strict=True):
            rows = each.rows[np.isin(of_rows[each.rows], chosen)]
            rows = rows[np.lexsort((each.table.rank[rows], of_rows[rows]))]
            groups.append(np.split(rows, np.searchsorted(of_rows[rows], chosen[1:])))
        both = []
        for rows_a, rows_b in zip(*groups, strict=True):
            if len(rows_a) and len(rows_b):
                both.append((rows_a, rows_b))
                continue
            side = 0 if len(rows_a) else 1
            (key,) = self.records[side].keys((rows_a if len(rows_a) else rows_b)[:1])
            self._lose(Key(*key.place, -1), "ab"[side])
        found = [_parts(each, [rows[side] for rows in both])
                 for side, each in enumerate(self.records)]  # fmt: skip
        for rows, *parts in zip(both, *found, strict=True):
            (key,) = self.records[0].keys(rows[0][:1])
            devices = int(parts[0][0].record.tags.get("devices", 1))
            key = Key(key.name, key.kind, key.step, key.call // devices, -1)
            seq = int(self.records[self.ordered_by].table.seq[rows[self.ordered_by][0]])
            self._pair_parts(key, seq, parts)

    def _pair_parts(self, key: Key, seq: int, parts: list[list[RecordPart]]) -> None:
        if _has_unknown_layout(*parts) or _has_unknown_layout(*parts[::-1]):
            self.unplaced.append(key)
            return
        parts = [_without_copies(*parts), _without_copies(*parts[::-1])]
        batches = [_by_batch(each) for each in parts]
        if len(batches[0]) < 2 or batches[0].keys() != batches[1].keys():
            self._add(key, seq, *parts)
            return
        for batch, own in batches[0].items():  # the same batches: each is compared by itself
            self._add(Key(*key.place, own[0].record.rank), seq, own, batches[1][batch])

    # -- records ---------------------------------------------------------------------------------

    def _pair_plain(self, pairs: Pairs, equal: Booleans) -> None:
        a, b = self.records
        self.equal = int(equal.sum())
        self.equal_rows.append(pairs[self.ordered_by][equal])
        rows, in_order = pairs.a[~equal], pairs[self.ordered_by][~equal]
        seqs = self.records[self.ordered_by].table.seq[in_order].tolist()
        found = a.keys(rows), seqs, a.parts(rows), b.parts(pairs.b[~equal])
        for key, seq, one, other in zip(*found, strict=True):
            self._add(key, seq, [one], [other])
        for each, lone, side in ((a, pairs.only_a, "a"), (b, pairs.only_b, "b")):
            for key in each.keys(lone):
                self._lose(key, side)

    def _add(self, key: Key, seq: int, a: list[RecordPart], b: list[RecordPart]) -> None:
        rule = self._rules.find(key.name, key.kind)
        if rule.ignore:
            self.ignored += 1
            return
        self.items.append(RecordPair(key, seq, a, b, self._tolerance.given(rule.atol, rule.rtol)))

    def _lose(self, key: Key, side: str) -> None:
        rule = self._rules.find(key.name, key.kind)
        if rule.ignore:
            self.ignored += 1
        else:
            self.lone.append((key, side))


def _has_kind(records: ChosenRecords, rows: Integers, kinds: tuple[str, ...]) -> Booleans:
    table = records.table
    return np.array([kind in kinds for kind in table.kinds], np.bool_)[table.kind[rows]]


def _batches(cells: Any, ranks: Integers) -> Integers:
    """Return which part of the global batch rows of activations and gradients are of."""
    keys = ShardKeys()
    keys.extend(cells)
    has_layout = (keys.flags & LAYOUT) > 0
    return np.where(has_layout, keys.batch, -1 - ranks)


def _parts(records: ChosenRecords, groups: list[Integers]) -> list[list[RecordPart]]:
    """Return the parts of each group of rows; replicas with equal statistics become one."""
    if not groups:
        return []
    table, rows = records.table, np.concatenate(groups)
    group = np.repeat(np.arange(len(groups)), list(map(len, groups)))
    cells = table.take(rows, [*ShardKeys.columns, "value", "digest", *STATISTICS])
    content = mixed([numbers(cells.column(name)) for name in STATISTICS], len(rows))
    keys = ShardKeys()
    keys.extend(cells)
    batch = np.where(_has_kind(records, rows, _BATCHED), _batches(cells, table.rank[rows]), 0)
    same = codes(group, keys.place, batch, content, digest_bits(cells.column("digest")))
    bare = only_has_statistics(cells)
    same = codes(np.where(bare, same, same.max(initial=0) + 1 + np.arange(len(rows))))
    first = np.sort(first_of(same))
    ranks: list[list[int]] = [[] for _ in first]
    for number, rank in zip(same.tolist(), table.rank[rows].tolist(), strict=True):
        ranks[number].append(rank)
    parts: list[list[RecordPart]] = [[] for _ in groups]
    for at, part in zip(first.tolist(), records.parts(rows[first]), strict=True):
        parts[group[at]].append(part._replace(ranks=tuple(ranks[same[at]])))
    return parts


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
