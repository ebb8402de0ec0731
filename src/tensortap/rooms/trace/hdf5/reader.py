"""The values of an HDF5 file that tensortap has written, with their original types."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tensortap.core.arguments import checked
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.files import CorruptFile, open_regular, plain
from tensortap.core.limits import available_memory, format_size
from tensortap.rooms.trace.hdf5.values import lists, value_of
from tensortap.rooms.trace.hdf5.writer import COLUMNS, import_h5py, path_of

_COMPRESSION = 1100  # more than gzip can achieve
_UNREADABLE = (OSError, RuntimeError, LookupError, ValueError, TypeError, MemoryError)


@dataclass(frozen=True, slots=True)
class StoredValues:
    """The values of a path, with the iteration and the rank of each."""

    values: list[Any]
    iterations: list[Any]
    ranks: list[Any]


@checked
def read_hdf5(path: str | os.PathLike[str], *names: str) -> dict[str, StoredValues]:
    """Return the values of an HDF5 file, bit for bit; of some paths, or of all.

    A file that is being written, or whose writer was killed, is read as of its last flush.

    >>> import tempfile, numpy
    >>> from tensortap.rooms.trace.hdf5.callback import HDF5
    >>> saver = HDF5(tempfile.mkdtemp() + "/trace.h5")
    >>> saver("forward.x", [numpy.ones(2), numpy.ones(3)], [0, 1], [0, 0])
    >>> saver.close()
    >>> read_hdf5(saver.path)["forward.x"].values
    [array([1., 1.]), array([1., 1., 1.])]
    """
    h5py = import_h5py()
    try:
        stream = open_regular(path)
    except FileNotFoundError:
        raise NotFound(f"no such file: {os.fspath(path)}") from None
    where = os.fspath(path)
    with stream:
        try:
            with h5py.File(stream, "r") as file:
                return _read(file, names, where)
        except TensortapError:
            raise
        except _UNREADABLE as error:
            reason = plain(str(error), 200) or type(error).__name__
            raise CorruptFile(
                f"{where} cannot be read; if it is being written, try again: {reason}"
            ) from None


def _read(file: Any, names: tuple[str, ...], where: str) -> dict[str, StoredValues]:
    if "tensortap_format" not in file.attrs:
        raise TensortapError(f"{where} was not written by tensortap")
    links = {path_of(link): link for link in file}
    for name in names:
        if name not in links:
            known = ", ".join(sorted(links)) or "nothing"
            raise NotFound(f"no {name!r} in {where}; it contains {known}")
    return {path: _stored(_group(file, links[path])) for path in names or links}


def _group(file: Any, link: str) -> Any:
    """Return a group after checking that all its data are in this file.

    HDF5 reads any other file that a link or a dataset names.
    """
    h5py = import_h5py()
    largest = min(available_memory(), _COMPRESSION * file.id.get_filesize() + (1 << 20))

    def inside(parent: Any, name: str, kind: type) -> Any:
        found = parent[name] if isinstance(parent.get(name, getlink=True), h5py.HardLink) else None
        if not isinstance(found, kind):
            raise CorruptFile(f"{plain(name)!r} is a link, or not a {kind.__name__.lower()}")
        return found

    group = inside(file, link, h5py.Group)
    size = 0
    for name in group:
        data = inside(group, name, h5py.Dataset)
        if data.external or data.is_virtual:
            raise CorruptFile(f"{plain(link)}/{plain(name)} has its data in another file")
        size += data.size * data.dtype.itemsize
    if size > largest:
        raise CorruptFile(f"{plain(link)} claims {format_size(size)}, which cannot be")
    return group


def _stored(group: Any) -> StoredValues:
    iterations, ranks = ([lists(row) for row in group[name][...]] for name in COLUMNS)
    # a writer that was interrupted may have written the value of a row, but not its columns
    count = min(len(iterations), len(ranks))
    return StoredValues(_values(group, count), iterations[:count], ranks[:count])


def _values(group: Any, count: int) -> list[Any]:
    data = group["values"]
    dtype, framework = data.attrs["tensortap_dtype"], data.attrs["tensortap_framework"]
    if "shapes" in group:
        shapes = group["shapes"][:count]
        rows = [data[(i, *map(slice, shape))] for i, shape in enumerate(shapes)]
    else:
        rows = list(data[:count])
    return [value_of(row, dtype, framework) for row in rows]
