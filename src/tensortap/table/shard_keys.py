"""Numbers that identify the shard and the batch of each row of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.runs.arrow import coded
from tensortap.table.columns import GrowingArray, InternedColumn, is_valid

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Booleans = NDArray[np.bool_]
    Integers = NDArray[np.int64]

SHARD, LAYOUT, PARTIAL = 1, 2, 4
"""Flags of rows: their place in the whole is known; they have a tag with placements; they are
partial sums."""


class ShardKeys:
    """The keys of all rows; places and batches are numbered over all ranks."""

    columns = ("shape", "shard_offsets", "shard_placements", "tags")  # of the run format

    def __init__(self) -> None:
        self._flags = GrowingArray(np.uint8)
        self._place, self._batch, self._mesh = (InternedColumn() for _ in range(3))

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

    def meshes(self, rows: Integers) -> list[str]:
        """Return the mesh that the tags of each row name, or ""."""
        return [self._mesh.texts[code] for code in self._mesh.rows.values[rows]]

    def extend(self, cells: pa.Table) -> None:
        """Append the keys of rows."""
        import pyarrow as pa
        import pyarrow.compute as pc

        shape, offsets, placements, tags = (cells.column(name) for name in self.columns)
        texts = [pc.binary_join(c.cast(pa.list_(pa.string())), ",") for c in (shape, offsets)]
        self._place.extend(pc.binary_join_element_wise(*texts, ":"))  # null if there is no shard
        layout, batch, mesh, words = tag_codes(tags.combine_chunks(), "placements", "batch", "mesh")
        self._batch.extend_coded(batch, words)
        self._mesh.extend_coded(mesh, words)
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
        codes = np.full(len(cells), -1)
        codes[row[at]] = items[at]
        found.append(codes)
    return *found, [*texts, ""]
