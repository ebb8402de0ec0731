"""Datasets that grow by rows: padded to the largest value, ragged, or texts.

Rows go through h5py's low-level interface: the other one takes longer than copying a row of 64 KiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.errors import TensortapError

SMALL_CHUNK = 32 << 10  # bytes; rows smaller than this share a chunk
LARGEST_CHUNK = 16 << 20

Array = NDArray[Any]


class Mismatch(TensortapError):
    """A value whose dtype or number of dimensions differs from the dataset of its path."""


@dataclass(frozen=True, slots=True)
class Filters:
    """How the chunks of values are stored."""

    compression: str | int | None = None
    compression_opts: Any = None
    shuffle: bool = False
    chunks: int | None = None  # rows per chunk

    def check(self) -> None:
        """Raise TensortapError for options that the library does not support."""
        import h5py

        if self.compression is None and self.compression_opts is not None:
            raise TensortapError(
                f"compression_opts={self.compression_opts!r} needs compression=, such as 'gzip'"
            )
        try:
            with h5py.File("check", "w", driver="core", backing_store=False) as file:
                file.create_dataset("x", (1,), chunks=(1,), dtype="u1", **self.options())
        except (TypeError, ValueError) as error:
            raise TensortapError(
                f"compression={self.compression!r}, compression_opts={self.compression_opts!r}, "
                f"shuffle={self.shuffle!r}: {error}"
            ) from None

    def options(self) -> dict[str, Any]:
        """Return the arguments for h5py's `create_dataset`."""
        options: dict[str, Any] = {"shuffle": self.shuffle}
        if self.compression is not None:
            options |= {"compression": self.compression, "compression_opts": self.compression_opts}
        return options


NO_FILTERS = Filters()


def chunk_of(row: tuple[int, ...], itemsize: int, rows: int | None) -> tuple[int, ...]:
    """Return the shape of chunks for rows of a shape: whole rows, unless they are huge.

    >>> chunk_of((128, 128), 4, None), chunk_of((), 8, None)
    ((1, 128, 128), (1024,))
    """
    sizes = [max(1, size) for size in row]
    for axis in range(len(sizes)):
        while math.prod(sizes) * itemsize > LARGEST_CHUNK and sizes[axis] > 1:
            sizes[axis] = -(-sizes[axis] // 2)
    nbytes = math.prod(sizes) * itemsize
    if rows is None:
        rows = max(1, min(1024, SMALL_CHUNK // nbytes))
    return (max(1, min(rows, LARGEST_CHUNK // nbytes)), *sizes)


class RowDataset:
    """A dataset that grows in all dimensions; the first one counts the rows."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.shape: tuple[int, ...] = data.shape
        chunk: tuple[int, ...] = data.chunks
        unfiltered = not data.id.get_create_plist().get_nfilters()
        self._chunk_row = chunk[1:] if unfiltered and chunk[0] == 1 else None
        self._waiting: list[Array] = []

    @classmethod
    def create(
        cls,
        group: Any,
        name: str,
        dtype: Any,
        row: tuple[int, ...],
        *,
        fill: Any = None,
        filters: Filters = NO_FILTERS,
    ) -> RowDataset:
        """Create an empty dataset; its rows have this shape until a larger one comes."""
        dtype = np.dtype(dtype)
        data = group.create_dataset(
            name, shape=(0, *row), maxshape=(None,) * (1 + len(row)), dtype=dtype, fillvalue=fill,
            chunks=chunk_of(row, dtype.itemsize, filters.chunks), **filters.options(),
        )  # fmt: skip
        return cls(data)

    def extend_later(self, rows: Sequence[Array]) -> None:
        """Append rows with the next `settle`: many small rows cost as much as one."""
        self._waiting.extend(rows)

    def settle(self) -> None:
        """Append the rows that wait."""
        if self._waiting:
            rows, self._waiting = self._waiting, []
            self.extend(rows)

    def extend(self, rows: Sequence[Array]) -> None:
        """Append rows; they have the dataset's dtype and number of dimensions, and any size."""
        first = rows[0].shape
        if len(rows) > 1 and first != self._chunk_row and all(row.shape == first for row in rows):
            self.append(np.stack(rows))
        else:
            for row in rows:
                self.append(row[np.newaxis])

    def append(self, block: Array) -> None:
        """Append the rows of an array."""
        from h5py import h5s

        start, sizes = self.shape[0], block.shape[1:]
        grown = [max(a, b) for a, b in zip(self.shape[1:], sizes, strict=True)]
        self.shape = (start + len(block), *grown)
        self.data.id.set_extent(self.shape)
        if not block.size:
            return
        block = np.ascontiguousarray(block)
        corner = (start, *[0] * len(sizes))
        if sizes == self._chunk_row:  # the row is a chunk and needs neither selection nor cache
            self.data.id.write_direct_chunk(corner, block)
            return
        space = h5s.create_simple(self.shape)
        space.select_hyperslab(corner, block.shape)
        self.data.id.write(h5s.create_simple(block.shape), space, block)


class PaddedValues:
    """Values in one dataset; a second one keeps their shapes as soon as two of them differ."""

    kind = "padded"

    def __init__(self, group: Any) -> None:
        self._group = group
        self._rows = RowDataset(group["values"])
        self._shapes = RowDataset(group["shapes"]) if "shapes" in group else None

    @classmethod
    def create(cls, group: Any, like: Array, filters: Filters) -> PaddedValues:
        RowDataset.create(group, "values", like.dtype, like.shape, filters=filters)
        return cls(group)

    def check(self, array: Array) -> None:
        """Raise Mismatch if an array does not fit."""
        dimensions = len(self._rows.shape) - 1
        if array.ndim != dimensions:
            raise Mismatch(
                f"the dataset has rows of {dimensions} dimensions, this value has {array.ndim}: "
                f"ragged=True stores both"
            )

    def extend(self, arrays: Sequence[Array]) -> None:
        count, *row = self._rows.shape
        self._rows.extend(arrays)
        shapes = [np.array(array.shape, np.int64) for array in arrays]
        if self._shapes is None:
            row = row if count else list(arrays[0].shape)
            if all(list(array.shape) == row for array in arrays):
                return
            self._shapes = RowDataset.create(self._group, "shapes", "int64", (len(row),), fill=-1)
            shapes = [np.array(row, np.int64)] * count + shapes
        self._shapes.extend(shapes)


class RaggedValues:
    """Values end to end in one flat dataset; others keep where each begins, and its shape."""

    kind = "ragged"

    def __init__(self, group: Any) -> None:
        names = ("values", "offsets", "shapes")
        self._flat, self._offsets, self._shapes = (RowDataset(group[name]) for name in names)

    @classmethod
    def create(cls, group: Any, like: Array, filters: Filters) -> RaggedValues:
        # `filters.chunks` counts rows, but here a row of the dataset is one element
        chunk = max(1, 2 * SMALL_CHUNK // like.dtype.itemsize)
        group.create_dataset(
            "values", shape=(0,), maxshape=(None,), dtype=like.dtype, chunks=(chunk,),
            **filters.options(),
        )  # fmt: skip
        RowDataset.create(group, "offsets", "int64", ()).extend([np.array(0, np.int64)])
        RowDataset.create(group, "shapes", "int64", (like.ndim,), fill=-1)
        return cls(group)

    def check(self, array: Array) -> None:
        """Accept any shape."""

    def extend(self, arrays: Sequence[Array]) -> None:
        start = self._flat.shape[0]
        ends = start + np.cumsum([array.size for array in arrays], dtype=np.int64)
        flat = [array.reshape(-1) for array in arrays]
        self._flat.append(flat[0] if len(flat) == 1 else np.concatenate(flat))
        self._offsets.extend(list(ends))
        self._shapes.extend([np.array(array.shape, np.int64) for array in arrays])


class TextValues:
    """A dataset of texts."""

    kind = "texts"

    def __init__(self, group: Any) -> None:
        self._data = group["values"]

    @classmethod
    def create(cls, group: Any, filters: Filters) -> TextValues:
        from h5py import string_dtype

        # without compression: HDF5 stores texts of variable length outside of the chunks
        group.create_dataset(
            "values", shape=(0,), maxshape=(None,), dtype=string_dtype(),
            chunks=(filters.chunks or 256,),
        )  # fmt: skip
        return cls(group)

    def check(self, text: str) -> None:
        """Accept any text."""

    def extend(self, texts: Sequence[str]) -> None:
        start = self._data.shape[0]
        self._data.resize(start + len(texts), axis=0)
        self._data[start:] = list(texts)
