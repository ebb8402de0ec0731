"""Windows of a compacted run: rows of all ranks and some steps, sorted, and a roll-up of them.

A window is a folder ``compact/<first>-<last>`` with two Parquet files and a manifest, described in
docs/format.md. The parts of the ranks stay as they are. A row of them is in a window if the window
has its step, and if its part was sealed when the window was written; all others are loose.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np

from tensortap.core.files import CorruptFile, check_regular, contained, plain, read_small
from tensortap.core.record import Kind
from tensortap.runs.arrow import leaf_statistics, read_groups, row_indices
from tensortap.runs.rows import check_columns, check_rows, unreadable, validated

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

FOLDER, RECORDS, WHOLE, MANIFEST = "compact", "records.parquet", "whole.parquet", "manifest.json"
FIRST_STEP = -1  # that of initial weights; rows of earlier steps stay loose
ROW_GROUP = 131_072
_LARGEST_GROUP = 1 << 30  # bytes of a row group in memory
_LARGEST_MANIFEST = 64 << 20  # bytes; it has the names, and three numbers per rank
_NAME = re.compile(r"(-?\d{1,18})-(-?\d{1,18})")
_WORDS = ["name", "kind", "dtype"]
_KINDS = {kind.value for kind in Kind}
# what a stranger may have written
_Number = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Manifest(msgspec.Struct, frozen=True):
    """The content of manifest.json."""

    format: int
    first: int  # step
    last: int
    rows: _Count
    rolled: _Count  # rows of the roll-up
    parts: dict[_Count, _Count]  # rank → how many of its parts were sealed
    seqs: dict[_Count, _Number]  # rank → its last record then
    # rank → records, first and last step, time of the last
    ranks: dict[_Count, tuple[_Number, _Number, _Number, _Number]]
    # the following are about all windows up to this one
    covered: dict[_Count, _Count]  # rank → how many of its first parts have no loose rows
    names: dict[str, dict[str, _Count]]  # of these parts, in order of first appearance
    missing: _Count  # records that these parts say were dropped
    before: str = ""  # `chained` windows up to this one, as they were when it was planned


class WindowFile:
    """A Parquet file of a window; its footer is read when it is first needed."""

    def __init__(self, path: Path, rows: int, opened: Callable[[], Any]) -> None:
        """`opened` returns the path, or an open file."""
        self.path = path
        self._rows = rows
        self._opened = opened

    @functools.cached_property
    def footer(self) -> Any:
        """The metadata of the file."""
        import pyarrow.parquet as pq

        try:
            source = self._opened()
            if isinstance(source, Path):
                check_regular(source)
            footer = pq.read_metadata(source)
            check_columns(self.path, footer.schema.to_arrow_schema())
        except unreadable() as error:
            raise CorruptFile(f"{self.path} cannot be read: {plain(str(error))}") from None
        check_rows(self.path, footer, self._rows)
        return footer

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The number of rows of each row group."""
        return [self.footer.row_group(i).num_rows for i in range(self.footer.num_row_groups)]

    @functools.cached_property
    def bounds(self) -> list[list[tuple[str, str]]]:
        """The first and the last kind, and the first and the last name of each row group."""
        found = []
        for group in range(len(self.sizes)):
            both = (leaf_statistics(self.footer, group, each) for each in ("kind", "name"))
            found.append([("", "\U0010ffff") if e is None else (e.min, e.max) for e in both])
        return found

    def groups(self, series: Collection[tuple[str, str]] | None = None) -> Iterable[int]:
        """Return the row groups, or those that may hold one of some kinds and names."""
        if series is None:
            return range(len(self.sizes))
        return [
            group
            for group, (kinds, names) in enumerate(self.bounds)
            if any(kinds[0] <= k <= kinds[1] and names[0] <= n <= names[1] for k, n in series)
        ]

    def read(self, group: int, columns: list[str]) -> pa.Table:
        """Return columns of a row group."""
        import pyarrow.parquet as pq

        words = [word for word in _WORDS if word in columns]
        footer, source = self.footer, self._opened()
        try:
            with pq.ParquetFile(source, metadata=footer, read_dictionary=words) as file:
                rows = validated(read_groups(file, [group], columns, _LARGEST_GROUP), None)
        except unreadable() as error:
            raise CorruptFile(f"{self.path} cannot be read: {plain(str(error))}") from None
        return rows.replace_schema_metadata(None)


class WindowBlock:
    """The rows of a row group, as a block of a table; `kept` are some of them, None: all."""

    def __init__(self, file: WindowFile, group: int, kept: Integers | None = None) -> None:
        self._file = file
        self._group = group
        self._kept = kept

    def __len__(self) -> int:
        return self._file.sizes[self._group] if self._kept is None else len(self._kept)

    def read(self, columns: list[str], start: int) -> pa.Table:
        """Return columns of all rows from `start` on."""
        rows = self._file.read(self._group, columns)
        return (rows if self._kept is None else rows.take(row_indices(self._kept))).slice(start)

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        """Return columns of the given rows."""
        within = rows if self._kept is None else self._kept[rows]
        return self._file.read(self._group, columns).take(row_indices(within))


class Window(NamedTuple):
    """A window whose manifest was read."""

    manifest: Manifest
    records: WindowFile
    whole: WindowFile
    is_chained: bool  # whether it was planned with the windows that are before it

    def has(self, step: Integers) -> NDArray[np.bool_]:
        """Return which steps are in the window."""
        return (step >= self.manifest.first) & (step <= self.manifest.last)


def read_windows(
    run: Path, names: Iterable[str], opened: Callable[[str], Any]
) -> tuple[Window, ...]:
    """Return the windows among the names in the folder ``compact``, by step.

    What is no window, because it is damaged or overlaps with another one, does not count: its rows
    are read from the parts.
    """
    found = []
    for name in names:
        steps = _NAME.fullmatch(name)
        manifest = _read_manifest(run, f"{FOLDER}/{name}/{MANIFEST}") if steps else None
        if manifest is not None and name == f"{manifest.first}-{manifest.last}":
            records, whole = [
                WindowFile(contained(run, path), rows, functools.partial(opened, path))
                for file, rows in ((RECORDS, manifest.rows), (WHOLE, manifest.rolled))
                if (path := f"{FOLDER}/{name}/{file}")
            ]
            found.append(Window(manifest, records, whole, is_chained=False))
    accepted: list[Window] = []
    before = ""
    for window in sorted(found, key=lambda each: (each.manifest.first, each.manifest.last)):
        if not accepted or window.manifest.first > accepted[-1].manifest.last:
            accepted.append(window._replace(is_chained=window.manifest.before == before))
            before = chained(before, window.manifest)
    return tuple(accepted)


def _read_manifest(run: Path, path: str) -> Manifest | None:
    try:
        found = msgspec.json.decode(read_small(run, path, _LARGEST_MANIFEST), type=Manifest)
    except (OSError, CorruptFile, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    known = all(_KINDS.issuperset(kinds) for kinds in found.names.values())
    return found if found.format == 1 and found.first <= found.last and known else None


def covering(windows: Iterable[Window]) -> Manifest | None:
    """Return the manifest that tells which parts have no loose rows; None if nobody knows.

    One does not know if somebody else has written a window before it, from fewer parts.
    """
    last, found = FIRST_STEP - 1, None
    for window in windows:
        if window.manifest.first != last + 1:
            break
        found = window.manifest if window.is_chained else found
        last = window.manifest.last
    return found


def chained(before: str, window: Manifest) -> str:
    """Return a digest of the steps and parts of a window, and of those before it."""
    text = f"{before} {window.first} {window.last} {sorted(window.parts.items())}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def is_loose(windows: Iterable[Window], rank: int, part: int, step: Integers) -> NDArray[np.bool_]:
    """Return which rows of a part are in no window, by their steps."""
    loose = np.ones(len(step), np.bool_)
    for window in windows:
        if part < window.manifest.parts.get(rank, 0):
            loose &= ~window.has(step)
    return loose
