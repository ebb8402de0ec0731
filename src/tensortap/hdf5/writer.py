"""Values of many iterations in one HDF5 file: a group a path, a row a value.

    /forward.x/values        one row a value, growing
    /forward.x/iterations    the iteration of every row (lists of them, for stacked values)
    /forward.x/ranks         the rank of every row, likewise
    /forward.x/shapes        where sizes differ: the shape of every row
    /forward.x/offsets       where values are ragged: row i is values[offsets[i]:offsets[i + 1]]

A path is its group's name, but for ``/``, ``%`` and what HDF5 can't spell, which are
percent-encoded as in a URL.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensortap.errors import MissingExtra, TensortapError
from tensortap.hdf5.journal import USER_BLOCK, WholeFile, lock, read_mark
from tensortap.hdf5.rows import NO_FILTERS, Filters, Mismatch, Padded, Ragged, Rows, Texts
from tensortap.hdf5.values import Item, integers, item_of, leaves_of

FORMAT = 1


def h5py_or_say() -> Any:
    try:
        import h5py
    except ImportError:
        raise MissingExtra("HDF5 needs h5py: pip install 'tensortap[hdf5]'") from None
    return h5py


@functools.lru_cache(maxsize=4096)
def link_name(path: str) -> str:
    """The name of a path's group.

    >>> link_name("blocks.0.forward.q"), link_name("a/b"), path_of("a%2Fb")
    ('blocks.0.forward.q', 'a%2Fb', 'a/b')
    """
    if path in ("", "."):  # HDF5 takes the one for nothing, the other for the group itself
        return "%2E" if path else "%"
    return "".join(c if _plain(c) else _escaped(c) for c in path)


def _plain(c: str) -> bool:
    return c not in "/%\0" and not 0xD800 <= ord(c) < 0xE000


def _escaped(c: str) -> str:
    return "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "surrogatepass"))


def path_of(link: str) -> str:
    """The path whose group has that name."""
    return "" if link == "%" else urllib.parse.unquote(link, errors="surrogatepass")


@dataclass(frozen=True, slots=True)
class Options:
    """How values are stored."""

    filters: Filters = NO_FILTERS
    float_dtype: str | None = None
    int_dtype: str | None = None
    iteration_dtype: str = "int64"
    ragged: bool = False


class _Series:
    """The group of a path: its values, and what is known of each beside them."""

    def __init__(
        self, group: Any, values: Padded | Ragged | Texts, beside: dict[str, Rows]
    ) -> None:
        self.values = values
        self.dtype = str(group["values"].attrs["tensortap_dtype"])
        self.beside = beside

    @classmethod
    def open(cls, group: Any) -> _Series:
        kinds: dict[str, Callable[[Any], Padded | Ragged | Texts]] = {
            "padded": Padded.open,
            "ragged": Ragged.open,
            "texts": lambda group: Texts(group["values"]),
        }
        values = kinds[str(group.attrs["tensortap_kind"])](group)
        named = str(group.attrs["tensortap_beside"]).split()
        return cls(group, values, {name: Rows(group[name]) for name in named})

    @classmethod
    def create(
        cls, parent: Any, link: str, item: Item, beside: Mapping[str, Any], options: Options
    ) -> _Series:
        group = parent.create_group(link)
        values: Padded | Ragged | Texts
        if item.array is None:
            values = Texts.create(group, options.filters)
        else:
            kind = Ragged if options.ragged else Padded
            values = kind.create(group, item.array, options.filters)
        columns = {
            name: Rows.create(group, name, array.dtype, array.shape, fill=-1)
            for name, array in beside.items()
        }
        group.attrs["tensortap_kind"] = values.kind
        group.attrs["tensortap_beside"] = " ".join(columns)
        data = group["values"]
        data.attrs["tensortap_dtype"] = item.dtype
        data.attrs["tensortap_framework"] = item.framework
        return cls(group, values, columns)

    def refuse(self, item: Item, beside: Mapping[str, Any]) -> None:
        """Say why a value does not fit, if it does not."""
        if item.dtype != self.dtype:
            remedy = (
                "" if "str" in (item.dtype, self.dtype)
                else ": float_dtype= or int_dtype= makes them one, or a callback before"
            )  # fmt: skip
            raise Mismatch(f"the dataset holds {self.dtype}, this value is {item.dtype}{remedy}")
        self.values.refuse(item.text if item.array is None else item.array)  # type: ignore[arg-type]
        for name, array in beside.items():
            if name not in self.beside or array.ndim != len(self.beside[name].shape) - 1:
                raise Mismatch(f"its {name} are of another form than those in the file")

    def extend(self, items: Sequence[Item], beside: Sequence[Mapping[str, Any]]) -> None:
        self.values.extend([i.text if i.array is None else i.array for i in items])  # type: ignore[misc]
        for name, rows in self.beside.items():
            rows.hold([each[name] for each in beside])

    def settle(self) -> None:
        """What is known beside the values goes to the file too."""
        for rows in self.beside.values():
            rows.settle()


class Writer:
    """An open HDF5 file that grows; what `flush` has returned from survives a kill."""

    def __init__(self, path: Path, exists: str, options: Options) -> None:
        h5py = h5py_or_say()
        self.path = path
        self.options = options
        self._exists = exists
        self._series: dict[str, _Series] = {}
        self.unflushed = 0
        self._owner = os.getpid()
        fresh = exists != "keep" or not path.exists()
        # a new file gets its name with the first flush: until then there is nothing to read
        self._draft = path.with_name(path.name + ".part") if fresh else None
        name = self._draft or path
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        lock(fd, path)
        if self._draft is not None:
            os.ftruncate(fd, 0)
        elif read_mark(fd) is None:
            os.close(fd)
            raise TensortapError(
                f"{path} was not written by tensortap: choose another name, or exists='replace'"
            )
        self._raw = WholeFile(fd, writing=True)
        if self._draft is not None:
            self.file = h5py.File(self._raw, "w", userblock_size=USER_BLOCK)
            self.file.attrs["tensortap_format"] = FORMAT
        else:
            self.file = h5py.File(self._raw, "r+")

    def groups(self) -> dict[str, Any]:
        """Path → its group."""
        return {path_of(link): group for link, group in self.file.items()}

    def append(self, path: str, value: Any, beside: Mapping[str, Any]) -> None:
        """Append one value; where it does not fit to those before, to another group.

        That is called as the path with ``%~1``, ``%~2`` … behind it, as no path can be.
        """
        link = link_name(path)
        for part in itertools.count(1):
            failed = self._extend(link, [value], [beside])
            if not failed:
                return
            if not isinstance(failed[0], Mismatch):
                raise failed[0]
            link = f"{link_name(path)}%~{part}"

    def extend(
        self, path: str, values: Sequence[Any], beside: Sequence[Mapping[str, Any]]
    ) -> dict[int, TensortapError]:
        """Append values, each with what is known of it; those that could not be, and why.

        Of a container every tensor, number and text goes to a group of its own: ``path[key]``.
        """
        apart = {i: leaves for i, value in enumerate(values) if (leaves := leaves_of(value))}
        if not apart:
            return self._extend(link_name(path), values, beside)
        whole = [i for i in range(len(values)) if i not in apart]
        found = self._extend(
            link_name(path), [values[i] for i in whole], [beside[i] for i in whole]
        )
        failed = {whole[i]: error for i, error in found.items()}
        for i, leaves in apart.items():
            for place, leaf in leaves:
                for error in self._extend(link_name(path + place), [leaf], [beside[i]]).values():
                    failed[i] = error
        return dict(sorted(failed.items()))

    def _extend(
        self, link: str, values: Sequence[Any], beside: Sequence[Mapping[str, Any]]
    ) -> dict[int, TensortapError]:
        options = self.options
        items: list[Item] = []
        columns: list[dict[str, Any]] = []
        failed: dict[int, TensortapError] = {}
        series = self._series.get(link) or self._open(link)
        for i, (value, known) in enumerate(zip(values, beside, strict=True)):
            try:
                item = item_of(value, options.float_dtype, options.int_dtype)
                row = {k: integers(v, options.iteration_dtype) for k, v in known.items()}
                if series is None:
                    series = _Series.create(self.file, link, item, row, options)
                    self._series[link] = series
                series.refuse(item, row)
            except TensortapError as error:
                failed[i] = error
                continue
            items.append(item)
            columns.append(row)
        if items:
            assert series is not None
            self.unflushed += len(items)
            series.extend(items, columns)
            self._raw.check()
        return failed

    def _open(self, link: str) -> _Series | None:
        group = self.file.get(link)
        if group is None:
            return None
        found = self._series[link] = _Series.open(group)
        return found

    def flush(self) -> None:
        """Everything appended so far becomes part of the file."""
        if self.unflushed or self._draft is not None:
            for series in self._series.values():
                series.settle()
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
                raise there_already(self.path) from None
            except OSError:  # a file system without links
                if self.path.exists():
                    raise there_already(self.path) from None
                draft.rename(self.path)
            else:
                draft.unlink()
        self._draft = None

    def close(self) -> None:
        """Flush, and close; nothing can be appended any more."""
        if self.file and os.getpid() == self._owner:  # not in a process that was forked
            try:
                self.flush()
                self.file.close()
                self._raw.commit()
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Close without a flush: the file stays as the last one has left it."""
        self._raw.abandon()
        if self.file:
            self.file.close()
        self._raw.close()
        if self._draft is not None and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._draft.unlink()


def there_already(path: Path) -> TensortapError:
    return TensortapError(
        f"{path} is there already: exists='keep' appends to it, exists='replace' makes it new"
    )
