"""The shard and the batch of each row of a table, and the rows of ranks that are of one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.core.record import Kind
from tensortap.runs.arrow import coded
from tensortap.table.columns import GrowingArray, InternedColumn, is_valid
from tensortap.table.numbering import codes, first_of

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from tensortap.table.table import Table

    Booleans = NDArray[np.bool_]
    Integers = NDArray[np.int64]

SHARD, LAYOUT, PARTIAL = 1, 2, 4
"""Flags of rows: their place in the whole is known; they have a tag with placements; they are
partial sums."""

_BATCHED = (Kind.ACTIVATION.value, Kind.GRADIENT.value)
_FREE = (Kind.VALUE.value, Kind.LOCAL.value)  # nobody knows what such values of ranks are


class ShardKeys:
    """The keys of all rows; places and batches are numbered over all ranks."""

    columns = ("shape", "shard_offsets", "shard_placements", "tags")  # of the run format

    def __init__(self) -> None:
        self._flags = GrowingArray(np.uint8)
        self._place, self._batch = InternedColumn(), InternedColumn()

    @property
    def size(self) -> int:
        """Number of rows that have keys."""
        return self._flags.size

    @property
    def place(self) -> NDArray[np.int32]:
        """The number of the shape and the offsets of each row that is a shard."""
        return self._place.rows.values

    @property
    def places(self) -> list[str]:
        """The shape and the offsets that each number of `place` stands for."""
        return self._place.texts

    @property
    def batch(self) -> NDArray[np.int32]:
        """The number of the batch that the tags of each row name."""
        return self._batch.rows.values

    @property
    def flags(self) -> NDArray[np.uint8]:
        """The flags of each row."""
        return self._flags.values

    def has(self, flag: int, rows: Integers) -> Booleans:
        """Return which rows have a flag."""
        return (self.flags[rows] & flag) > 0

    def extend(self, cells: pa.Table) -> None:
        """Append the keys of rows."""
        import pyarrow as pa
        import pyarrow.compute as pc

        shape, offsets, placements, tags = (cells.column(name) for name in self.columns)
        texts = [pc.binary_join(c.cast(pa.list_(pa.string())), ",") for c in (shape, offsets)]
        self._place.extend(pc.binary_join_element_wise(*texts, ":"))  # null if there is no shard
        layout, batch, words = tag_codes(tags.combine_chunks(), "placements", "batch")
        self._batch.extend_coded(batch, words)
        code, words = coded(pc.binary_join(placements, " "))
        is_partial = np.array(["P" in word for word in words], np.bool_)[code]
        flags = SHARD * is_valid(offsets) + LAYOUT * (layout >= 0) + PARTIAL * is_partial
        self._flags.extend(flags)


def tag_codes(cells: pa.MapArray, *keys: str) -> tuple[Any, ...]:
    """Return codes of the texts that each tag has, -1 for none, and the texts; "" is the last.

    `map_lookup` takes ten times as long.
    """
    import pyarrow as pa

    ends = np.from_dlpack(cells.offsets) if len(cells) else np.zeros(1, np.int32)
    inside = slice(int(ends[0]), int(ends[-1]))
    names, known = coded(pa.chunked_array([cells.keys[inside]]))
    items, texts = coded(pa.chunked_array([cells.items[inside]]))
    row = np.repeat(np.arange(len(cells)), np.diff(ends))
    found = []
    for key in keys:
        at = names == (known.index(key) if key in known else -1)
        numbers = np.full(len(cells), -1)
        numbers[row[at]] = items[at]
        found.append(numbers)
    return *found, [*texts, ""]


# -- records of several ranks that belong to one tensor ---------------------------------------


class Places(NamedTuple):
    """The whole that each row is a part of; rows with the same batch and place are replicas."""

    batch: Integers
    place: Integers
    must_agree: Booleans  # replicas that are merged only if they are equal
    apart: Booleans  # rows that are never merged


def places_of(parts: Table, rows: Integers) -> Places:
    """Return what rows are parts of, by their shards and tags."""
    keys = parts.shard_keys()
    flags = keys.flags[rows]
    is_shard, has_layout, partial = ((flags & flag) > 0 for flag in (SHARD, LAYOUT, PARTIAL))
    batched, free = _has_kind(parts, rows, _BATCHED), _has_kind(parts, rows, _FREE)
    # without a layout, every rank has its own part of the batch
    of_batch = np.where(has_layout, -1 - keys.batch[rows], parts.rank[rows])
    return Places(
        batch=np.where(batched, of_batch, 0),
        place=np.where(is_shard, keys.place[rows], -1),
        must_agree=~is_shard & (has_layout | ~batched),
        apart=partial | (free & ~is_shard),
    )


def same_tensor(parts: Table, rows: Integers) -> Integers:
    """Return the same number for rows that are parts or replicas of one tensor.

    The same call of a name may have been recorded twice on a rank: those are two tensors.
    """
    columns: list[NDArray[Any]] = [parts.kind, parts.name, parts.step, parts.dtype]
    if (parts.call > 0).any():  # it is not copied if every name was called once
        columns.append(parts.call)
    tensor = codes(*(column[rows] for column in columns))
    of_rank = codes(tensor, parts.rank[rows])
    sizes = np.bincount(of_rank)
    if (sizes < 2).all():
        return tensor
    repeated = np.flatnonzero(sizes[of_rank] > 1)
    order = repeated[np.lexsort((parts.seq[rows[repeated]], of_rank[repeated]))]
    starts = np.flatnonzero(np.diff(of_rank[order], prepend=-1))
    repeat = np.zeros(len(rows), np.int64)
    lengths = np.diff(np.append(starts, len(order)))
    repeat[order] = np.arange(len(order)) - np.repeat(starts, lengths)
    return codes(tensor, repeat)


def contents_of(parts: Table, rows: Integers, groups: Integers) -> NDArray[np.uint64]:
    """Return 64 bits of each row that differ in a group if statistics or digests of rows do."""
    content = parts.contents()[rows]
    ends = parts.take(rows[[0, -1]] if len(rows) else rows, ["digest"]).column(0)
    if ends.null_count == len(ends):  # with `track(digests=True)` all of them have one
        return content
    digest = parts.digests()[rows]
    has_all = np.bincount(groups, digest > 0)[groups] == np.bincount(groups)[groups]
    return content ^ np.where(has_all, digest, 0).astype(np.uint64)


def unequal_groups(
    parts: Table, rows: Integers, groups: Integers, content: NDArray[np.uint64] | None = None
) -> Booleans:
    """Return which groups have rows whose statistics, or any other contents, differ."""
    content = parts.contents()[rows] if content is None else content
    differs = content != content[first_of(groups)[groups]]
    return np.bincount(groups[differs], minlength=int(groups.max(initial=-1)) + 1) > 0


def _has_kind(parts: Table, rows: Integers, kinds: tuple[str, ...]) -> Booleans:
    return np.array([kind in kinds for kind in parts.kinds], np.bool_)[parts.kind[rows]]
