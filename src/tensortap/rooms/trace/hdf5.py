"""Values of many iterations in one HDF5 file: one group per path, one row per value.

    /forward.x/values        one row per value
    /forward.x/iterations    the iteration of every row (a list of them for stacked values)
    /forward.x/ranks         the rank of every row, likewise
    /forward.x/shapes        if sizes differ: the shape of every row

A group is named after its path; ``/``, ``%`` and NUL are percent-encoded as in a URL.

HDF5 has integers, float16 to float64 and complex numbers. Any other dtype is stored as unsigned
integers of its size, bit for bit, with its name in the attribute ``tensortap_dtype``: bfloat16 as
uint16, float8 as uint8, times as int64.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import threading
import time
import urllib.parse
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.arguments import checked
from tensortap.core.dtypes import DTYPES, itemsize, numpy_dtype
from tensortap.core.errors import MissingExtra, TensortapError
from tensortap.core.files import file_mode
from tensortap.core.ranks import rank_and_world_size
from tensortap.core.record import Number, TensorData, Value
from tensortap.values.snapshot import borrow
from tensortap.values.view import as_numpy

Array = NDArray[Any]
_NATIVE = frozenset(row.name for row in DTYPES.values() if row.numpy == row.name)
_SWAPPED = re.compile(r">[iufc]\d+")
_INTEGERS = frozenset(name for name in _NATIVE if DTYPES[name].kind in ("int", "uint"))
_PYTHON: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}


def import_h5py() -> Any:
    """Return the module h5py; raise MissingExtra if it is not installed."""
    try:
        import h5py
    except ImportError:
        raise MissingExtra.of("HDF5 needs h5py", "hdf5") from None
    return h5py


@dataclass(frozen=True, slots=True)
class HDF5Options:
    """Storage options of values; raises TensortapError for options that cannot be."""

    compression: str | int | None = None
    compression_opts: Any = None
    float_dtype: Any = None
    int_dtype: Any = None

    def __post_init__(self) -> None:
        h5py = import_h5py()
        for name in ("float_dtype", "int_dtype"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _check_dtype(getattr(self, name), name))
        if self.compression is None and self.compression_opts is not None:
            raise TensortapError(
                f"compression_opts={self.compression_opts!r} needs compression=, such as 'gzip'"
            )
        try:
            with h5py.File("check", "w", driver="core", backing_store=False) as file:
                file.create_dataset("x", (1,), chunks=(1,), dtype="u1", **self.filters())
        except (TypeError, ValueError) as error:
            raise TensortapError(
                f"compression={self.compression!r}, compression_opts={self.compression_opts!r}: "
                f"{error}"
            ) from None

    def filters(self) -> dict[str, Any]:
        """Return the arguments for h5py's `create_dataset`."""
        if self.compression is None:
            return {}
        return {"compression": self.compression, "compression_opts": self.compression_opts}


def link_name(path: str) -> str:
    return path.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")


def path_of(link: str) -> str:
    return urllib.parse.unquote(link)


# -- values --------------------------------------------------------------------------------


class _StoredValue(NamedTuple):
    """A value as it is stored: an array of a dtype that HDF5 has."""

    dtype: str
    content: Array


def _stored_value(
    value: Any, float_dtype: str | None = None, int_dtype: str | None = None
) -> _StoredValue:
    """Return a value as it will be stored, without copying its memory if possible."""
    name, array = _array(borrow(value), value)
    wanted = int_dtype if name in _INTEGERS else float_dtype if _is_float(name) else None
    if wanted is not None and wanted != name:
        array = _converted(array, name, wanted)
        name = wanted
    return _StoredValue(name, array.view(_stored_dtype(name)))


def _array(node: Value, value: Any) -> tuple[str, Array]:
    if isinstance(node, TensorData):
        return node.dtype, as_numpy(node)
    if isinstance(node, Number) and node.kind == "complex":
        return "complex128", np.array(complex(*node.parts), np.complex128)
    name = _PYTHON.get(type(node))
    if name is not None:
        return name, np.array(node, name)
    if isinstance(node, Number):
        raise TensortapError("HDF5 cannot store an integer of more than 64 bits")
    raise TensortapError(
        f"HDF5 stores tensors and numbers, not a {type(value).__name__}: trace its parts, or "
        "convert it in an earlier callback"
    )


@functools.lru_cache(maxsize=256)
def _is_float(name: str) -> bool:
    # packed dtypes, and those that this ml_dtypes does not have, are only bits for NumPy
    row = DTYPES.get(name)
    return row is not None and row.kind == "float" and numpy_dtype(name).name == name


def _check_dtype(given: Any, option: str) -> str:
    """Return the name of a dtype of NumPy or torch; raise if it does not fit the option."""
    name = str(getattr(given, "__name__", given)).removeprefix("torch.")
    if not (_is_float(name) if option == "float_dtype" else name in _INTEGERS):
        example = "'float16', 'float32' or 'bfloat16'" if option == "float_dtype" else "'int32'"
        raise TensortapError(f"{option} must be the name of a dtype, like {example}, got {given!r}")
    return name


def _converted(array: Array, name: str, wanted: str) -> Array:
    target = numpy_dtype(wanted)
    if name in _INTEGERS and array.size:
        limits, low, high = np.iinfo(target), int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise TensortapError(f"int_dtype={wanted!r} cannot hold values from {low} to {high}")
    with np.errstate(all="ignore"):  # the user chose the dtype: too large values become infinite
        return array.astype(target)


def _stored_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype in the file for a dtype of tensors.

    >>> _stored_dtype("float32"), _stored_dtype("bfloat16"), _stored_dtype("float8_e4m3fn")
    (dtype('float32'), dtype('uint16'), dtype('uint8'))
    """
    if name in _NATIVE or _SWAPPED.fullmatch(name):
        return np.dtype(name)
    size = itemsize(name)
    if size == 8:  # times
        return np.dtype(np.int64)
    return np.dtype(f"u{size}" if size in (1, 2, 4) else f"V{size}")


def _integers(item: Any) -> Array:
    """Return an iteration or a rank, or nested lists of them, as an array padded with -1."""
    if not isinstance(item, (list, tuple)):
        return np.array(item, np.int64)
    parts = [_integers(part) for part in item]
    if len({part.ndim for part in parts}) > 1:
        raise TensortapError("iterations and ranks must be nested equally deep in their lists")
    shape = np.max([part.shape for part in parts], axis=0) if parts else ()
    array = np.full((len(parts), *shape), -1, np.int64)
    for i, part in enumerate(parts):
        corner: Any = (i, *map(slice, part.shape))
        array[corner] = part
    return array


# -- rows ------------------------------------------------------------------------------------


def chunk_of(row: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the shape of chunks for rows of a shape: whole rows, unless they are huge."""
    sizes = [max(1, size) for size in row]
    for axis in range(len(sizes)):
        while math.prod(sizes) * itemsize > 16 << 20 and sizes[axis] > 1:
            sizes[axis] = -(-sizes[axis] // 2)
    rows = (32 << 10) // (math.prod(sizes) * itemsize)  # small rows share a chunk
    return (max(1, min(1024, rows)), *sizes)


def _create_rows(
    group: Any, name: str, dtype: Any, row: tuple[int, ...], *, fill: Any = None, **filters: Any
) -> Any:
    """Create a dataset without rows; they have this shape until a larger one comes."""
    dtype = np.dtype(dtype)
    return group.create_dataset(
        name, shape=(0, *row), maxshape=(None,) * (1 + len(row)), dtype=dtype, fillvalue=fill,
        chunks=chunk_of(row, dtype.itemsize), **filters,
    )  # fmt: skip


def _write_rows(data: Any, start: int, rows: Sequence[Array]) -> None:
    """Write rows from `start` on; the dataset ends behind them and grows where they are larger.

    Through h5py's low-level interface: the other one takes longer than copying a row of 64 KiB.
    """
    same = len(rows) > 1 and len({row.shape for row in rows}) == 1
    for block in [np.stack(rows)] if same else [row[np.newaxis] for row in rows]:
        _write_block(data, start, block)
        start += len(block)


def _write_block(data: Any, start: int, block: Array) -> None:
    from h5py import h5s

    shape = (start + len(block), *map(max, data.shape[1:], block.shape[1:]))
    data.id.set_extent(shape)
    if block.size:
        space = h5s.create_simple(shape)
        space.select_hyperslab((start, *[0] * (block.ndim - 1)), block.shape)
        data.id.write(h5s.create_simple(block.shape), space, np.ascontiguousarray(block))


class _PathGroup:
    """The group of a path: its values, and columns with the iteration and rank of each.

    Values have one row each; a second dataset keeps their shapes as soon as two of them differ.
    The columns are written last, by `settle`, and count the values: what an earlier call has not
    finished is overwritten.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._values = group["values"]
        self._dtype = str(self._values.attrs["tensortap_dtype"])
        self._columns = {name: group[name] for name in ("iterations", "ranks")}
        self._shapes = group.get("shapes")
        self._settled = self._count = min(map(len, self._columns.values()))
        self._waiting: list[Mapping[str, Any]] = []
        self._dimensions: int = self._values.ndim - 1
        self._chunk: int = math.prod(self._values.chunks) * self._values.dtype.itemsize

    @classmethod
    def create(
        cls,
        parent: Any,
        link: str,
        value: _StoredValue,
        columns: Mapping[str, Any],
        options: HDF5Options,
    ) -> _PathGroup:
        group = parent.create_group(link)
        like = value.content
        _create_rows(group, "values", like.dtype, like.shape, **options.filters())
        for name, array in columns.items():
            _create_rows(group, name, array.dtype, array.shape, fill=-1)
        group["values"].attrs["tensortap_dtype"] = value.dtype
        return cls(group)

    def check(self, value: _StoredValue, columns: Mapping[str, Any]) -> None:
        """Raise TensortapError if a value does not fit."""
        if value.dtype != self._dtype:
            raise TensortapError(
                f"the dataset holds {self._dtype}, this value is {value.dtype}: float_dtype=, "
                "int_dtype= or an earlier callback can convert them"
            )
        expected, dimensions = self._dimensions, value.content.ndim
        if dimensions != expected:
            raise TensortapError(
                f"the dataset has rows of {expected} dimensions, this value has {dimensions}: an "
                "earlier callback can reshape it"
            )
        for name, array in columns.items():
            if array.ndim != self._columns[name].ndim - 1:
                raise TensortapError(f"its {name} are nested differently from those in the file")

    def size_of(self, values: Sequence[Array]) -> int:
        """Return how many bytes values take at most, without what HDF5 needs to find them."""
        # chunks at the border are partly used
        return 2 * sum(array.nbytes + self._chunk for array in values)

    def extend(self, values: Sequence[Array], columns: Sequence[Mapping[str, Any]]) -> None:
        """Append values, which `check` has accepted, with their columns."""
        row = self._values.shape[1:] if self._count else values[0].shape
        if self._shapes is None and any(array.shape != row for array in values):
            self._shapes = _create_rows(self._group, "shapes", "int64", (len(row),), fill=-1)
            _write_rows(self._shapes, 0, [np.array(row, np.int64)] * self._count)
        if self._shapes is not None:
            shapes = [np.array(array.shape, np.int64) for array in values]
            _write_rows(self._shapes, self._count, shapes)
        _write_rows(self._values, self._count, values)
        self._waiting += columns
        self._count += len(values)

    def settle(self) -> None:
        """Write the columns of the values since the last time: many cost as much as one."""
        if self._waiting:
            for name, data in self._columns.items():
                _write_rows(data, self._settled, [each[name] for each in self._waiting])
            self._settled, self._waiting = self._count, []


# -- the file --------------------------------------------------------------------------------


class HDF5Writer:
    """An HDF5 file that grows; what was appended before `flush` returns survives a kill.

    In h5py's default format, and without its SWMR mode: both a newer format and SWMR mark the file
    as open, and after a kill nobody can open it without removing the mark.
    `exists` says what to do with an existing file: "refuse", "keep" or "replace".
    """

    def __init__(self, path: Path, exists: str, options: HDF5Options) -> None:
        h5py = import_h5py()
        self.path = path
        self.options = options
        self._groups: dict[str, _PathGroup] = {}
        self._owner = os.getpid()
        if exists == "replace":
            path.unlink(missing_ok=True)
        is_new = exists != "keep" or not path.exists()
        if is_new:
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, file_mode()))
            except FileExistsError:
                raise file_exists(path) from None
        elif any(path.samefile(other.path) for other in _open_writers):
            raise _is_written(path)  # HDF5 itself opens a file twice in one process
        try:
            self.file = h5py.File(path, "w" if is_new else "r+")
        except BlockingIOError:
            raise _is_written(path) from None
        if is_new:
            self.file.attrs["tensortap_format"] = 1
        elif "tensortap_format" not in self.file.attrs:
            self.file.close()
            raise TensortapError(
                f"{path} was not written by tensortap: choose another name, or exists='replace'"
            )
        _open_writers.add(self)
        self.flush()

    @property
    def is_ours(self) -> bool:
        """Return whether this process has the file open; a fork of it has not."""
        return bool(self.file) and os.getpid() == self._owner

    def extend(
        self, link: str, values: Sequence[Any], columns: Sequence[Mapping[str, Any]]
    ) -> dict[int, TensortapError]:
        """Append values with their columns; return the errors of those that do not fit."""
        options = self.options
        failed: dict[int, TensortapError] = {}
        fitting: list[tuple[_StoredValue, dict[str, Any]]] = []
        group = self._groups.get(link)
        if group is None and link in self.file:
            group = self._groups[link] = _PathGroup(self.file[link])
        for i, (value, known) in enumerate(zip(values, columns, strict=True)):
            try:
                stored = _stored_value(value, options.float_dtype, options.int_dtype)
                row = {k: _integers(v) for k, v in known.items()}
                if group is None:
                    self._reserve(0)
                    group = _PathGroup.create(self.file, link, stored, row, options)
                    self._groups[link] = group
                group.check(stored, row)
            except TensortapError as error:
                failed[i] = error
            else:
                fitting.append((stored, row))
        if group is not None and fitting:
            contents = [stored.content for stored, _ in fitting]
            self._reserve(group.size_of(contents))
            group.extend(contents, [row for _, row in fitting])
        return failed

    def _reserve(self, nbytes: int) -> None:
        """Raise OSError if the disk is full, before HDF5 fails: it cannot close the file then."""
        fd, end = self.file.id.get_vfd_handle(), self.file.id.get_filesize()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, end, nbytes + (1 << 20))  # and room for what finds the values

    def flush(self) -> None:
        """Make everything appended so far part of the file."""
        if self.is_ours:
            for group in self._groups.values():
                group.settle()
            self.file.flush()
            os.ftruncate(self.file.id.get_vfd_handle(), self.file.id.get_filesize())

    def close(self) -> None:
        if self.is_ours:
            self.flush()
            self.file.close()
        _open_writers.discard(self)


_open_writers: weakref.WeakSet[HDF5Writer] = weakref.WeakSet()


def _flush_before_fork() -> None:
    """Leave nothing to write in a child: its end would make HDF5 write it over the parent's."""
    for writer in list(_open_writers):
        with contextlib.suppress(Exception):
            writer.flush()


os.register_at_fork(before=_flush_before_fork)


def file_exists(path: Path) -> TensortapError:
    return TensortapError(
        f"{path} already exists: exists='keep' appends to it, exists='replace' replaces it"
    )


def _is_written(path: Path) -> TensortapError:
    return TensortapError(f"{path} is already being written by this or another program")


_EXISTS = ("refuse", "keep", "replace")
_FLUSH_INTERVAL = 0.2  # seconds; a flush costs as much as several rows


class HDF5:
    """A callback that moves traced values to an HDF5 file as they come.

    It removes the values from the lists that it is given; `datasets` has them from then on.
    `exists` says what to do with an existing file: ``refuse``, ``keep`` (append) or ``replace``.
    Values that were flushed survive the end of the process, however it ends. A flush follows a
    call when the last flush is a fifth of a second old.

    >>> import tempfile, numpy
    >>> saver = HDF5(tempfile.mkdtemp() + "/trace.h5")
    >>> values, iterations, ranks = [numpy.ones(3), numpy.zeros(3)], [0, 1], [0, 0]
    >>> saver("forward.x", values, iterations, ranks)
    >>> saver.close()
    >>> saver.datasets["forward.x"].shape, values
    ((2, 3), [])
    """

    @checked
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        compression: str | int | None = None,
        compression_opts: Any = None,
        float_dtype: Any = None,
        int_dtype: Any = None,
        exists: str = "refuse",
    ) -> None:
        if exists not in _EXISTS:
            raise TensortapError(f"exists must be 'refuse', 'keep' or 'replace', got {exists!r}")
        self._given = Path(path).absolute()
        self._exists = exists
        self._options = HDF5Options(compression, compression_opts, float_dtype, int_dtype)
        self._flushed_at = -math.inf  # so that the first call is flushed
        self._lock = threading.RLock()
        self._opened: Path | None = None
        self._writer: HDF5Writer | None = None
        self._reading: Any = None
        self._closer: Any = None
        if exists == "refuse" and self.path.exists():
            raise file_exists(self.path)  # before the training, not after its first hour

    def __repr__(self) -> str:
        return f"HDF5({str(self._given)!r})"

    @property
    def path(self) -> Path:
        """The file; ranks other than 0 that keep values of their own have files of their own."""
        if self._opened is not None:
            return self._opened
        rank, _ = rank_and_world_size()
        given = self._given
        return given.with_name(f"{given.stem}_rank{rank}{given.suffix}") if rank else given

    @property
    def datasets(self) -> Mapping[str, Any]:
        """Path → the h5py dataset of its values, for reading; also after `close`."""
        with self._lock:
            file = self._writer.file if self._writer is not None else self._reading
            if not file and self.path.exists():
                file = self._reading = import_h5py().File(self.path, "r")
            groups = file.items() if file else ()
            return {path_of(link): group["values"] for link, group in groups}

    def __call__(
        self, name: str, values: list[Any], iterations: list[Any], ranks: list[Any]
    ) -> None:
        """Append the values of a path to its dataset, and remove them from the lists.

        Values that do not fit stay in the lists, and the first error is raised.
        """
        if not len(values) == len(iterations) == len(ranks):
            raise TensortapError(
                f"{name}: {len(values)} values, {len(iterations)} iterations and {len(ranks)} ranks"
                f": earlier callbacks must change all three lists"
            )
        if not values:
            return
        pairs = zip(iterations, ranks, strict=True)
        columns = [{"iterations": iteration, "ranks": rank} for iteration, rank in pairs]
        with self._lock:
            failed = self._write(name, values, columns)
        for items in (values, iterations, ranks):
            items[:] = [items[i] for i in failed]
        for error in failed.values():
            raise TensortapError(f"{name} to {self.path}: {error}") from error

    def _write(
        self, name: str, values: list[Any], columns: list[dict[str, Any]]
    ) -> dict[int, TensortapError]:
        try:
            writer = self._writer or self._open()
            if not writer.is_ours:
                raise TensortapError(f"this is a fork of the process that writes {self.path}")
            failed = writer.extend(link_name(name), values, columns)
            if time.monotonic() - self._flushed_at >= _FLUSH_INTERVAL:
                self._flush(writer)
            return failed
        except TensortapError:
            raise
        except Exception as error:  # such as a full disk
            raise TensortapError(f"{name} cannot be written to {self.path}: {error}") from error

    def _flush(self, writer: HDF5Writer) -> None:
        writer.flush()
        self._flushed_at = time.monotonic()

    def _open(self) -> HDF5Writer:
        if self._reading:
            self._reading.close()
            self._reading = None
        path = self._opened = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = self._writer = HDF5Writer(path, self._exists, self._options)
        self._exists = "keep"  # from now on the file is ours
        # at the end of the program at the latest, while h5py still works
        self._closer = weakref.finalize(self, writer.close)
        return writer

    def flush(self) -> None:
        """Make all values so far part of the file."""
        with self._lock:
            if self._writer is not None:
                self._flush(self._writer)

    def close(self) -> None:
        """Flush and close the file; the next value opens it again and is appended."""
        with self._lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                self._closer.detach()
                try:
                    self._flush(writer)
                finally:
                    writer.close()
