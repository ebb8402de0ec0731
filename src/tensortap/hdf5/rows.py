"""Groups of datasets that grow by rows: values padded to the largest, ragged, or texts.

Rows go through h5py's low-level interface: the other one takes longer than copying a row of 64 KiB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensortap.errors import MissingExtra, TensortapError
from tensortap.hdf5.values import Array, StoredValue, check_dtype

SMALL_CHUNK = 32 << 10  # bytes; rows smaller than this share a chunk
LARGEST_CHUNK = 16 << 20


def import_h5py() -> Any:
    """Return the module h5py; raise MissingExtra if it is not installed."""
    try:
        import h5py
    except ImportError:
        raise MissingExtra("HDF5 needs h5py: pip install 'tensortap[hdf5]'") from None
    return h5py


class Mismatch(TensortapError):
    """A value whose dtype or number of dimensions differs from the dataset of its path."""


@dataclass(frozen=True, slots=True)
class HDF5Options:
    """Storage options of values; raises TensortapError for options that cannot be."""

    compression: str | int | None = None
    compression_opts: Any = None
    shuffle: bool = False
    chunks: int | None = None  # rows per chunk
    float_dtype: Any = None
    int_dtype: Any = None
    iteration_dtype: Any = "int64"
    ragged: bool = False

    def __post_init__(self) -> None:
        h5py = import_h5py()
        for name in ("float_dtype", "int_dtype", "iteration_dtype"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_dtype(getattr(self, name), name))
        if self.chunks is not None and self.chunks < 1:
            raise TensortapError(f"chunks must be at least 1, got {self.chunks}")
        if self.compression is None and self.compression_opts is not None:
            raise TensortapError(
                f"compression_opts={self.compression_opts!r} needs compression=, such as 'gzip'"
            )
        try:
            with h5py.File("check", "w", driver="core", backing_store=False) as file:
                file.create_dataset("x", (1,), chunks=(1,), dtype="u1", **self.filters())
        except (TypeError, ValueError) as error:
            raise TensortapError(
                f"compression={self.compression!r}, compression_opts={self.compression_opts!r}, "
                f"shuffle={self.shuffle!r}: {error}"
            ) from None

    def filters(self) -> dict[str, Any]:
        """Return the arguments for h5py's `create_dataset`."""
        filters: dict[str, Any] = {"shuffle": self.shuffle}
        if self.compression is not None:
            filters |= {"compression": self.compression, "compression_opts": self.compression_opts}
        return filters


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
        options: HDF5Options | None = None,
    ) -> RowDataset:
        """Create an empty dataset; its rows have this shape until a larger one comes."""
        dtype = np.dtype(dtype)
        data = group.create_dataset(
            name, shape=(0, *row), maxshape=(None,) * (1 + len(row)), dtype=dtype, fillvalue=fill,
            chunks=chunk_of(row, dtype.itemsize, options.chunks if options else None),
            **(options.filters() if options else {}),
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


class PathGroup:
    """The group of a path: its values, and columns with the iteration and rank of each.

    ``padded`` values have one row each; a second dataset keeps their shapes as soon as two of them
    differ. ``ragged`` values lie end to end, and two datasets keep where each begins, and its
    shape. ``texts`` have one row each.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._kind = str(group.attrs["tensortap_kind"])
        self._dtype = str(group["values"].attrs["tensortap_dtype"])
        names = str(group.attrs["tensortap_beside"]).split()
        self._columns = {name: RowDataset(group[name]) for name in names}
        found: list[Any] = [
            RowDataset(group[name]) if name in group else None
            for name in ("values", "offsets", "shapes")
        ]
        self._values, self._offsets, self._shapes = found

    @classmethod
    def create(
        cls,
        parent: Any,
        link: str,
        value: StoredValue,
        columns: Mapping[str, Any],
        options: HDF5Options,
    ) -> PathGroup:
        from h5py import string_dtype

        group = parent.create_group(link)
        kind, like = "padded", value.content
        if isinstance(like, str):
            kind = "texts"
            # without compression: HDF5 stores texts of variable length outside of the chunks
            chunks = (options.chunks or 256,)
            group.create_dataset("values", (0,), string_dtype(), maxshape=(None,), chunks=chunks)
        elif options.ragged:
            kind = "ragged"
            # `options.chunks` counts rows, but here a row of the dataset is one element
            chunks = (max(1, 2 * SMALL_CHUNK // like.dtype.itemsize),)
            group.create_dataset(
                "values", (0,), like.dtype, maxshape=(None,), chunks=chunks, **options.filters()
            )
            RowDataset.create(group, "offsets", "int64", ()).extend([np.array(0, np.int64)])
            RowDataset.create(group, "shapes", "int64", (like.ndim,), fill=-1)
        else:
            RowDataset.create(group, "values", like.dtype, like.shape, options=options)
        for name, array in columns.items():
            RowDataset.create(group, name, array.dtype, array.shape, fill=-1)
        group.attrs["tensortap_kind"] = kind
        group.attrs["tensortap_beside"] = " ".join(columns)
        group["values"].attrs["tensortap_dtype"] = value.dtype
        group["values"].attrs["tensortap_framework"] = value.framework
        return cls(group)

    def check(self, value: StoredValue, columns: Mapping[str, Any]) -> None:
        """Raise Mismatch if a value does not fit."""
        if value.dtype != self._dtype:
            hint = ": float_dtype=, int_dtype= or an earlier callback can convert them"
            if "str" in (value.dtype, self._dtype):
                hint = ""
            raise Mismatch(f"the dataset holds {self._dtype}, this value is {value.dtype}{hint}")
        expected = len(self._values.shape) - 1
        dimensions = np.ndim(value.content)
        if self._kind == "padded" and dimensions != expected:
            raise Mismatch(
                f"the dataset has rows of {expected} dimensions, this value has {dimensions}: "
                "ragged=True stores both"
            )
        for name, array in columns.items():
            if name not in self._columns or array.ndim != len(self._columns[name].shape) - 1:
                raise Mismatch(f"its {name} are nested differently from those in the file")

    def extend(self, values: Sequence[Any], columns: Sequence[Mapping[str, Any]]) -> None:
        """Append values, which `check` has accepted, with their columns."""
        store = self._pad if self._kind == "padded" else self._join
        store(values) if self._kind != "texts" else self._write(values)
        for name, rows in self._columns.items():
            rows.extend_later([each[name] for each in columns])

    def _pad(self, arrays: Sequence[Array]) -> None:
        count, *row = self._values.shape
        self._values.extend(arrays)
        shapes = [np.array(array.shape, np.int64) for array in arrays]
        if self._shapes is None:
            row = row if count else list(arrays[0].shape)
            if all(list(array.shape) == row for array in arrays):
                return
            self._shapes = RowDataset.create(self._group, "shapes", "int64", (len(row),), fill=-1)
            shapes = [np.array(row, np.int64)] * count + shapes
        self._shapes.extend(shapes)

    def _join(self, arrays: Sequence[Array]) -> None:
        start = self._values.shape[0]
        ends = start + np.cumsum([array.size for array in arrays], dtype=np.int64)
        self._values.append(np.concatenate([array.reshape(-1) for array in arrays]))
        self._offsets.extend(list(ends))
        self._shapes.extend([np.array(array.shape, np.int64) for array in arrays])

    def _write(self, texts: Sequence[str]) -> None:
        data = self._group["values"]
        start = data.shape[0]
        data.resize(start + len(texts), axis=0)
        data[start:] = list(texts)

    def settle(self) -> None:
        """Append the rows of columns that wait."""
        for rows in self._columns.values():
            rows.settle()
