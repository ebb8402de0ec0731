"""Values of many iterations in one HDF5 file: one group per path, one row per value.

    /forward.x/values        one row per value
    /forward.x/iterations    the iteration of every row (a list of them for stacked values)
    /forward.x/ranks         the rank of every row, likewise
    /forward.x/shapes        if sizes differ: the shape of every row
    /forward.x/offsets       if values are ragged: row i is values[offsets[i]:offsets[i + 1]]

A group is named after its path; ``/``, ``%`` and characters that HDF5 does not allow are
percent-encoded as in a URL.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensortap.errors import TensortapError
from tensortap.files import file_mode
from tensortap.hdf5.journal import USER_BLOCK_SIZE, JournaledFile, lock, read_user_block
from tensortap.hdf5.rows import HDF5Options, Mismatch, PathGroup, import_h5py
from tensortap.hdf5.values import StoredValue, integers, leaves_of, stored_value

FORMAT = 1


@functools.lru_cache(maxsize=4096)
def link_name(path: str) -> str:
    """Return the name of a path's group.

    >>> link_name("blocks.0.forward.q"), link_name("a/b"), path_of("a%2Fb")
    ('blocks.0.forward.q', 'a%2Fb', 'a/b')
    """
    if path in ("", "."):  # for HDF5 "" is no name, and "." is the group itself
        return "%2E" if path else "%"
    return "".join(c if _is_plain(c) else _escaped(c) for c in path)


def _is_plain(c: str) -> bool:
    return c not in "/%\0" and not 0xD800 <= ord(c) < 0xE000


def _escaped(c: str) -> str:
    return "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "surrogatepass"))


def path_of(link: str) -> str:
    """Return the path of the group with this name."""
    return "" if link == "%" else urllib.parse.unquote(link, errors="surrogatepass")


class HDF5Writer:
    """An HDF5 file that grows; what was appended before `flush` returns survives a kill.

    `exists` says what to do with an existing file: "refuse", "keep" or "replace".
    """

    def __init__(self, path: Path, exists: str, options: HDF5Options) -> None:
        h5py = import_h5py()
        self.path = path
        self.options = options
        self.unflushed = 0
        self._exists = exists
        self._groups: dict[str, PathGroup] = {}
        self._owner = os.getpid()
        is_new = exists != "keep" or not path.exists()
        # a new file gets its name with the first flush: before, there is nothing to read
        self._draft = path.with_name(path.name + ".part") if is_new else None
        fd = os.open(self._draft or path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, file_mode())
        lock(fd, path)
        if is_new:
            os.ftruncate(fd, 0)
        elif read_user_block(fd) is None:
            os.close(fd)
            raise TensortapError(
                f"{path} was not written by tensortap: choose another name, or exists='replace'"
            )
        self._raw = JournaledFile(fd, writing=True)
        if is_new:
            self.file = h5py.File(self._raw, "w", userblock_size=USER_BLOCK_SIZE)
            self.file.attrs["tensortap_format"] = FORMAT
        else:
            self.file = h5py.File(self._raw, "r+")

    def append(self, path: str, value: Any, columns: Mapping[str, Any]) -> None:
        """Append one value, to another group if it does not fit to those before.

        The other groups are named ``path%~1``, ``path%~2`` …, which is the name of no path.
        """
        link = link_name(path)
        for part in itertools.count(1):
            failed = self._extend(link, [value], [columns])
            if not failed:
                return
            if not isinstance(failed[0], Mismatch):
                raise failed[0]
            link = f"{link_name(path)}%~{part}"

    def extend(
        self, path: str, values: Sequence[Any], columns: Sequence[Mapping[str, Any]]
    ) -> dict[int, TensortapError]:
        """Append values with their columns; return the errors of those that do not fit.

        Each tensor, number and text in a container goes to a group of its own: ``path[key]``.
        """
        whole: list[int] = []
        failed: dict[int, TensortapError] = {}
        for i, value in enumerate(values):
            leaves = leaves_of(value)
            if not leaves:
                whole.append(i)
            for place, leaf in leaves:
                for error in self._extend(link_name(path + place), [leaf], [columns[i]]).values():
                    failed[i] = error
        if whole:
            errors = self._extend(
                link_name(path), [values[i] for i in whole], [columns[i] for i in whole]
            )
            failed.update({whole[i]: error for i, error in errors.items()})
        return dict(sorted(failed.items()))

    def _extend(
        self, link: str, values: Sequence[Any], columns: Sequence[Mapping[str, Any]]
    ) -> dict[int, TensortapError]:
        options = self.options
        failed: dict[int, TensortapError] = {}
        fitting: list[tuple[StoredValue, dict[str, Any]]] = []
        group = self._groups.get(link)
        if group is None and link in self.file:
            group = self._groups[link] = PathGroup(self.file[link])
        for i, (value, known) in enumerate(zip(values, columns, strict=True)):
            try:
                stored = stored_value(value, options.float_dtype, options.int_dtype)
                row = {k: integers(v, options.iteration_dtype) for k, v in known.items()}
                if group is None:
                    group = PathGroup.create(self.file, link, stored, row, options)
                    self._groups[link] = group
                group.check(stored, row)
            except TensortapError as error:
                failed[i] = error
            else:
                fitting.append((stored, row))
        if group is not None and fitting:
            self.unflushed += len(fitting)
            group.extend([stored.content for stored, _ in fitting], [row for _, row in fitting])
            self._raw.check()
        return failed

    def flush(self) -> None:
        """Make everything appended so far part of the file."""
        if self.unflushed or self._draft is not None:
            for group in self._groups.values():
                group.settle()
            self.file.flush()
            self._raw.commit()
            self.unflushed = 0
            if self._draft is not None:
                self._publish(self._draft)

    def _publish(self, draft: Path) -> None:
        if self._exists == "replace":
            os.replace(draft, self.path)
        else:
            try:
                os.link(draft, self.path)
            except FileExistsError:
                raise file_exists(self.path) from None
            except OSError:  # a file system without links
                if self.path.exists():
                    raise file_exists(self.path) from None
                draft.rename(self.path)
            else:
                draft.unlink()
        self._draft = None

    def close(self) -> None:
        """Flush and close the file."""
        if self.file and os.getpid() == self._owner:  # not in a forked child
            try:
                self.flush()
                self.file.close()
                self._raw.commit()
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Close the file without a flush: it stays as the last flush has left it."""
        self._raw.abandon()
        if self.file:
            self.file.close()
        self._raw.close()
        if self._draft is not None and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._draft.unlink()


def file_exists(path: Path) -> TensortapError:
    """Return the error for a file that must not exist."""
    return TensortapError(
        f"{path} already exists: exists='keep' appends to it, exists='replace' replaces it"
    )
