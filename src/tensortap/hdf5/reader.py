"""The values of an HDF5 file that tensortap has written, as what they were."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tensortap.errors import NotFound, TensortapError
from tensortap.hdf5.journal import WholeFile, read_mark
from tensortap.hdf5.values import lists, value_of
from tensortap.hdf5.writer import h5py_or_say, path_of

_TRIES = 20
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Stored:
    """The values of a path, with the iteration and the rank of each."""

    values: list[Any]
    iterations: list[Any]
    ranks: list[Any]
    beside: dict[str, list[Any]]


def read_hdf5(path: str | os.PathLike[str], *names: str) -> dict[str, Stored]:
    """The values of an HDF5 file, bit for bit, in their own dtypes; of some paths, or of all.

    A file that is being written, or whose writer was killed, is read as of its last flush.

    >>> import tempfile, numpy
    >>> from tensortap.hdf5.callback import HDF5
    >>> saver = HDF5(tempfile.mkdtemp() + "/trace.h5")
    >>> saver("forward.x", [numpy.ones(2), numpy.ones(3)], [0, 1], [0, 0])
    >>> saver.close()
    >>> read_hdf5(saver.path)["forward.x"].values
    [array([1., 1.]), array([1., 1., 1.])]
    """
    return consistently(path, lambda file: _read(file, names, os.fspath(path)))


def consistently(path: str | os.PathLike[str], read: Callable[[Any], _Found]) -> _Found:
    """What `read` finds in the file, as of one commit, whoever is writing it meanwhile."""
    h5py = h5py_or_say()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(f"no file {os.fspath(path)}") from None
    try:
        for attempt in range(_TRIES):
            before = read_mark(fd)
            if before is None:
                raise TensortapError(f"{os.fspath(path)} was not written by tensortap")
            try:
                with h5py.File(WholeFile(fd, writing=False), "r") as file:
                    found = read(file)
            except (OSError, RuntimeError, KeyError):
                after = read_mark(fd)
                if after is not None and after.packed() == before.packed():
                    raise
            else:
                after = read_mark(fd)
                if after is not None and after.packed() == before.packed():
                    return found
            time.sleep(0.001 * 2 ** min(attempt, 7))
    finally:
        os.close(fd)
    raise TensortapError(
        f"{os.fspath(path)} changes faster than it can be read: copy it, then read"
    )


def _read(file: Any, names: tuple[str, ...], where: str) -> dict[str, Stored]:
    links = {path_of(link): link for link in file}
    for name in names:
        if name not in links:
            raise NotFound(f"no {name!r} in {where}; there is {', '.join(sorted(links)) or 'none'}")
    return {path: _stored(file[links[path]]) for path in names or links}


def _stored(group: Any) -> Stored:
    columns = {
        name: [lists(row) for row in group[name][...]]
        for name in str(group.attrs["tensortap_beside"]).split()
    }
    beside = {k: v for k, v in columns.items() if k not in ("iterations", "ranks")}
    return Stored(_values(group), columns["iterations"], columns["ranks"], beside)


def _values(group: Any) -> list[Any]:
    data = group["values"]
    kind = str(group.attrs["tensortap_kind"])
    if kind == "texts":
        return list(data.asstr()[...])
    dtype, framework = data.attrs["tensortap_dtype"], data.attrs["tensortap_framework"]
    shapes = group["shapes"][...] if "shapes" in group else None
    if kind == "ragged":
        assert shapes is not None
        offsets = group["offsets"][...]
        found = [
            data[offsets[i] : offsets[i + 1]].reshape([n for n in shape if n >= 0])
            for i, shape in enumerate(shapes)
        ]
    elif shapes is None:
        found = list(data[...])
    else:
        found = [_cropped(data, i, shape) for i, shape in enumerate(shapes)]
    return [value_of(array, dtype, framework) for array in found]


def _cropped(data: Any, row: int, shape: Any) -> Any:
    index = (row, *[slice(size) for size in shape])
    return data[index]
