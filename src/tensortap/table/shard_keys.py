"""Numbers that identify the shard and the batch of each row of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.runs.arrow import coded, lists, numbers, row_indices
from tensortap.table.columns import GrowingArray, is_valid
from tensortap.table.numbering import codes, distinct, first_of

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Booleans = NDArray[np.bool_]
    Integers = NDArray[np.int64]

SHARD, LAYOUT, PARTIAL, MESH = 1, 2, 4, 8
"""Flags of rows: their place in the whole is known; they have a tag with placements; they are
partial sums; they have a tag with the mesh."""


class ShardKeys:
    """The keys of all rows; places and batches are numbered over all ranks."""

    columns = ("shape", "shard_offsets", "shard_placements", "tags")  # of the run format

    def __init__(self) -> None:
        self._place = GrowingArray(np.int32)
        self._batch = GrowingArray(np.int32)
        self._flags = GrowingArray(np.uint8)
        self._places: dict[Any, int] = {}
        self._batches: dict[str, int] = {}
        self._starts: list[int] = []  # the first row of each part that was appended
        self._meshes: list[str | None] = []  # its mesh; None if it has several

    @property
    def size(self) -> int:
        """Number of rows that have keys."""
        return self._flags.size

    @property
    def place(self) -> NDArray[np.int32]:
        """The number of the shape and the offsets of each row."""
        return self._place.values

    @property
    def batch(self) -> NDArray[np.int32]:
        """The number of the batch that the tags of each row name."""
        return self._batch.values

    @property
    def flags(self) -> NDArray[np.uint8]:
        """The flags of each row."""
        return self._flags.values

    def has(self, flag: int, rows: Integers) -> Booleans:
        """Return which rows have a flag."""
        return (self.flags[rows] & flag) > 0

    def meshes(self, rows: Integers) -> list[str] | None:
        """Return the mesh that the tags of each row name, or None if only the tags tell it."""
        parts = np.searchsorted(self._starts, rows, side="right") - 1
        found: list[str] = []
        for part, has_mesh in zip(parts.tolist(), self.has(MESH, rows).tolist(), strict=True):
            mesh = self._meshes[part]
            if mesh is None:
                return None
            found.append(mesh if has_mesh else "")
        return found

    def extend(self, cells: pa.Table) -> None:
        """Append the keys of rows."""
        shapes = [cells.column(name) for name in ("shape", "shard_offsets")]
        self._place.extend(self._place_codes(shapes))
        layout, batch, mesh, texts = _tags(
            cells.column("tags").combine_chunks(), "placements", "batch", "mesh"
        )
        words = [*texts, ""]  # the last one is that of rows without the tag, whose code is -1
        meshes = distinct(mesh[mesh >= 0])
        self._starts.append(self.size)
        self._meshes.append(words[meshes[0] if len(meshes) else -1] if len(meshes) < 2 else None)
        batches = [self._batches.setdefault(word, len(self._batches)) for word in words]
        self._batch.extend(np.array(batches, np.int32)[batch])
        flags = SHARD * is_valid(shapes[1]) + PARTIAL * _is_partial(
            cells.column("shard_placements")
        )
        self._flags.extend(flags + LAYOUT * (layout >= 0) + MESH * (mesh >= 0))

    def _place_codes(self, shapes: list[pa.ChunkedArray]) -> NDArray[np.int32]:
        local = codes(*map(_list_codes, shapes))
        first = row_indices(first_of(local))
        keys = zip(*(column.take(first).to_pylist() for column in shapes), strict=True)
        texts = [(tuple(shape or ()), tuple(offsets or ())) for shape, offsets in keys]
        places = [self._places.setdefault(text, len(self._places)) for text in texts]
        return np.array(places, np.int32)[local]


def _is_partial(placements: pa.ChunkedArray) -> Booleans:
    """Return which rows are partial sums."""
    lengths, items, words = _text_lists(placements)
    is_sum = np.array([word.startswith("P") for word in words], np.bool_)[items]
    sums, ends = np.append(0, np.cumsum(is_sum)), np.cumsum(lengths)
    return np.asarray(sums[ends] > sums[ends - lengths])


def _list_codes(column: pa.ChunkedArray) -> Integers:
    """Return codes of a column of lists of integers."""
    lengths, items = lists(column)
    starts, items = np.cumsum(lengths) - lengths, np.append(items, 0)
    places = range(int(lengths.max(initial=0)))
    at = [np.where(lengths > i, items[np.where(lengths > i, starts + i, 0)], 0) for i in places]
    return codes(lengths, *at)


def _text_lists(column: pa.ChunkedArray) -> tuple[Integers, Integers, list[str]]:
    """Return the lengths of lists of texts, the codes of all items, and the texts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = np.nan_to_num(numbers(pc.list_value_length(column))).astype(np.int64)
    items, texts = coded(pa.chunked_array([c.flatten() for c in column.chunks], pa.string()))
    return lengths, items.astype(np.int64), texts


def _tags(cells: pa.MapArray, *keys: str) -> tuple[Any, ...]:
    """Return the codes of the values that each tag has, -1 for none, and the values."""
    import pyarrow as pa

    ends = np.from_dlpack(cells.offsets) if len(cells) else np.zeros(1, np.int32)
    inside = slice(int(ends[0]), int(ends[-1]))
    names, known = coded(pa.chunked_array([cells.keys[inside]]))
    items, texts = coded(pa.chunked_array([cells.items[inside]]))
    row = np.repeat(np.arange(len(cells)), np.diff(ends))
    found = []
    for key in keys:
        codes_of_row = np.full(len(cells), -1)
        if key in known:
            at = np.flatnonzero(names == known.index(key))
            codes_of_row[row[at]] = items[at]
        found.append(codes_of_row)
    return *found, texts
