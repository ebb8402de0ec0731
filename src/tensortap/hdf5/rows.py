"""Datasets that grow by rows: padded to the largest, ragged, or texts.

Rows go through h5py's lower level: its upper one takes longer than the copy of a 64 KiB row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.errors import TensortapError

CHUNK = 32 << 10
"""Rows smaller than this share a chunk."""

LARGEST_CHUNK = 16 << 20

Array = NDArray[Any]


class Mismatch(TensortapError):
    """A value that is of another dtype, or has other dimensions, than the dataset of its path."""


@dataclass(frozen=True, slots=True)
class Filters:
    """How the chunks of values are stored."""

    compression: str | int | None = None
    compression_opts: Any = None
    shuffle: bool = False
    chunks: int | None = None  # rows in one

    @property
    def plain(self) -> bool:
        return self.compression is None and not self.shuffle

    def check(self) -> None:
        """Refuse what the library can't do, before anything is to be stored."""
        import h5py

        if self.compression is None and self.compression_opts is not None:
            raise TensortapError(
                f"compression_opts={self.compression_opts!r} without compression: say "
                f"compression='gzip' too"
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
        found: dict[str, Any] = {"shuffle": self.shuffle}
        if self.compression is not None:
            found.update(compression=self.compression, compression_opts=self.compression_opts)
        return found


NO_FILTERS = Filters()


def chunk_of(row: tuple[int, ...], itemsize: int, rows: int | None) -> tuple[int, ...]:
    """The shape of the chunks for rows of a shape: whole rows, where they are not huge.

    >>> chunk_of((128, 128), 4, None), chunk_of((), 8, None)
    ((1, 128, 128), (1024,))
    """
    sizes = [max(1, size) for size in row]
    for axis in range(len(sizes)):
        while math.prod(sizes) * itemsize > LARGEST_CHUNK and sizes[axis] > 1:
            sizes[axis] = -(-sizes[axis] // 2)
    nbytes = math.prod(sizes) * itemsize
    if rows is None:
        rows = max(1, min(1024, CHUNK // nbytes))
    return (max(1, min(rows, LARGEST_CHUNK // nbytes)), *sizes)


class Rows:
    """A dataset of n dimensions whose first is the row; it grows in all of them."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.dtype: np.dtype[Any] = data.dtype
        self.shape: tuple[int, ...] = data.shape
        chunk: tuple[int, ...] = data.chunks
        plain = not data.id.get_create_plist().get_nfilters()
        self._whole_rows = chunk[1:] if plain and chunk[0] == 1 else None
        self._held: list[Array] = []

    @classmethod
    def create(
        cls,
        group: Any,
        name: str,
        dtype: np.dtype[Any],
        row: tuple[int, ...],
        *,
        fill: Any = None,
        filters: Filters = NO_FILTERS,
    ) -> Rows:
        """A new dataset, without rows, whose rows have this shape until a larger one comes."""
        data = group.create_dataset(
            name, shape=(0, *row), maxshape=(None,) * (1 + len(row)), dtype=dtype, fillvalue=fill,
            chunks=chunk_of(row, dtype.itemsize, filters.chunks), **filters.options(),
        )  # fmt: skip
        return cls(data)

    def hold(self, rows: Sequence[Array]) -> None:
        """Append rows when `settle` is called: many small ones cost as much as one."""
        self._held.extend(rows)

    def settle(self) -> None:
        """Append the rows that are held."""
        if self._held:
            held, self._held = self._held, []
            self.extend(held)

    def extend(self, rows: Sequence[Array]) -> None:
        """Append rows of the dataset's dtype and number of dimensions, whatever their sizes."""
        first = rows[0].shape
        alike = all(row.shape == first for row in rows)
        if alike and len(rows) > 1 and first != self._whole_rows:
            self._write(np.stack(rows), len(rows))
            return
        for row in rows:
            self._write(row[np.newaxis], 1)

    def _write(self, block: Array, count: int) -> None:
        from h5py import h5s

        start = self.shape[0]
        sizes = block.shape[1:]
        grown = tuple([max(a, b) for a, b in zip(self.shape[1:], sizes, strict=True)])
        self.data.id.set_extent((start + count, *grown))
        self.shape = (start + count, *grown)
        if not block.size:
            return
        block = np.ascontiguousarray(block)
        if sizes == self._whole_rows:
            # a row is a chunk: it needs no selection and no chunk cache
            self.data.id.write_direct_chunk((start, *[0] * len(sizes)), block)
            return
        place = h5s.create_simple(self.shape)
        place.select_hyperslab((start, *[0] * len(sizes)), block.shape)
        self.data.id.write(h5s.create_simple(block.shape), place, block)


class Padded:
    """Values in one dataset; their shapes are kept beside once two of them differ."""

    kind = "padded"

    def __init__(self, group: Any, rows: Rows, shapes: Rows | None) -> None:
        self._group = group
        self._rows = rows
        self._shapes = shapes
        self.data = rows.data

    @classmethod
    def open(cls, group: Any) -> Padded:
        shapes = Rows(group["shapes"]) if "shapes" in group else None
        return cls(group, Rows(group["values"]), shapes)

    @classmethod
    def create(cls, group: Any, like: Array, filters: Filters) -> Padded:
        return cls(
            group, Rows.create(group, "values", like.dtype, like.shape, filters=filters), None
        )

    def refuse(self, array: Array) -> None:
        """Say why an array does not fit, if it does not."""
        if array.ndim != len(self._rows.shape) - 1:
            raise Mismatch(
                f"the dataset has rows of {len(self._rows.shape) - 1} dimensions, this value has "
                f"{array.ndim}: ragged=True holds both"
            )

    def extend(self, arrays: Sequence[Array]) -> None:
        before = self._rows.shape
        self._rows.extend(arrays)
        sizes = [array.shape for array in arrays]
        if self._shapes is None:
            if before[0] == 0:
                before = (0, *sizes[0])
            if all(size == before[1:] for size in sizes):
                return
            old = [np.array(before[1:], np.int64)] * before[0]
            width = len(before) - 1
            self._shapes = Rows.create(self._group, "shapes", np.dtype(np.int64), (width,), fill=-1)
            if old:
                self._shapes.extend(old)
        self._shapes.extend([np.array(size, np.int64) for size in sizes])


class Ragged:
    """Values end to end in one flat dataset, with where each begins and its shape beside."""

    kind = "ragged"

    def __init__(self, data: Any, offsets: Rows, shapes: Rows) -> None:
        self.data = data
        self._flat = Rows(data)
        self._offsets = offsets
        self._shapes = shapes

    @classmethod
    def open(cls, group: Any) -> Ragged:
        return cls(group["values"], Rows(group["offsets"]), Rows(group["shapes"]))

    @classmethod
    def create(cls, group: Any, like: Array, filters: Filters) -> Ragged:
        # chunks of the usual size: `filters.chunks` counts rows, and here a row is an element
        chunk = max(1, 2 * CHUNK // like.dtype.itemsize)
        data = group.create_dataset(
            "values", shape=(0,), maxshape=(None,), dtype=like.dtype, chunks=(chunk,),
            **filters.options(),
        )  # fmt: skip
        integer = np.dtype(np.int64)
        offsets = Rows.create(group, "offsets", integer, ())
        offsets.extend([np.array(0, np.int64)])
        return cls(data, offsets, Rows.create(group, "shapes", integer, (like.ndim,), fill=-1))

    def refuse(self, array: Array) -> None:
        """Nothing: any shape fits."""

    def extend(self, arrays: Sequence[Array]) -> None:
        start = self._flat.shape[0]
        ends = start + np.cumsum([array.size for array in arrays], dtype=np.int64)
        flat = [array.reshape(-1) for array in arrays]
        joined = flat[0] if len(flat) == 1 else np.concatenate(flat)
        if joined.size:
            self._flat._write(joined, joined.size)
        self._offsets.extend(list(ends))
        self._shapes.extend([np.array(array.shape, np.int64) for array in arrays])


@dataclass(slots=True)
class Texts:
    """A dataset of texts."""

    data: Any
    kind: str = field(default="texts", init=False)

    @classmethod
    def create(cls, group: Any, filters: Filters) -> Texts:
        from h5py import string_dtype

        # no filters: HDF5 keeps texts of any length outside the chunks
        return cls(
            group.create_dataset(
                "values", shape=(0,), maxshape=(None,), dtype=string_dtype(),
                chunks=(filters.chunks or 256,),
            )
        )  # fmt: skip

    def refuse(self, text: str) -> None:
        """Nothing: any text fits."""

    def extend(self, texts: Sequence[str]) -> None:
        start = self.data.shape[0]
        self.data.resize(start + len(texts), axis=0)
        self.data[start:] = list(texts)
