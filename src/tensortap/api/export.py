"""A run in another format: one file, or a folder of plain ones."""

from __future__ import annotations

import collections
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensortap.buffers import view_of
from tensortap.errors import TensortapError
from tensortap.frameworks.snapshot import borrow
from tensortap.frameworks.view import as_numpy
from tensortap.record import Fields, Items, Kind, Mapping, Number, Record, TensorData, Value
from tensortap.runs.arrow import column
from tensortap.runs.folders import file_name
from tensortap.runs.object_files import load_file

if TYPE_CHECKING:
    from tensortap.api.run import Run

Progress = Callable[[Iterable[Any], int], Any]


def export(
    run: Run, target: str | Path, *, names: str | None = None, progress: Progress | None = None
) -> int:
    """Write a run to ``.npz``, ``.h5``, ``.parquet`` or a folder; how many records it was.

    Texts are in the ``.h5`` and ``.parquet`` alone. Records that have no array, number or text
    (statistics, dumped objects) are only in the ``.parquet``, and in a folder, which gets the
    dumped files as they are.
    """
    path = Path(target)
    writers = {".npz": _npz, ".h5": _hdf5, ".hdf5": _hdf5, ".parquet": _parquet}
    write = writers.get(path.suffix)
    if write is None:
        if path.suffix and not path.is_dir():
            known = ", ".join(sorted(writers))
            raise TensortapError(f"no export to {path.suffix!r}: there is {known}, or a folder")
        write = _folder
    if path.exists() and not path.is_dir():
        raise TensortapError(f"{path} is there already: remove it, or choose another name")
    try:
        wanted = [n for n in run.names() if names is None or re.search(names, n)]
    except re.error as error:
        raise TensortapError(f"not a regular expression: {names!r} ({error})") from None
    heads = [record for _, held in run.reader.by_name(wanted) for record in held]
    shown = progress(heads, len(heads)) if progress is not None else heads
    seen: collections.Counter[tuple[object, ...]] = collections.Counter()
    try:
        return write(run, path, (_load(run, head, seen) for head in shown), set(wanted))
    except BaseException:
        path.with_name(path.name + ".part").unlink(missing_ok=True)
        raise


def _load(run: Run, head: Record, seen: collections.Counter[tuple[object, ...]]) -> Record:
    """A record with its value, and how often one like it came before: a step that was redone."""
    key = (head.name, head.kind, head.step, head.call, head.rank)
    again, seen[key] = seen[key], seen[key] + 1
    record = run.reader.load(head)
    if not again:
        return record
    return msgspec.structs.replace(record, tags={**record.tags, _AGAIN: str(again)})


_AGAIN = "~again"  # a tag of nobody else


def _title(record: Record) -> str:
    return record.name if record.kind is Kind.VALUE else f"{record.name}.{record.kind.value}"


def _key(record: Record, ranked: bool) -> str:
    rank = f"_rank{record.rank}" if ranked else ""
    call = f".{record.call}" if record.call else ""
    again = f"~{record.tags[_AGAIN]}" if _AGAIN in record.tags else ""
    return f"{_title(record)}@{record.step}{call}{again}{rank}"


_NUMBERS = (TensorData, bool, int, float)


def _parts(
    value: Value, path: str = "", leaves: tuple[type, ...] = _NUMBERS
) -> list[tuple[str, Any]]:
    """The leaves of a value, tensors and numbers, each with its place in it."""
    if isinstance(value, leaves):
        return [(path, value)]
    if isinstance(value, Items):
        parts = [(f"[{i}]", item) for i, item in enumerate(value.items)]
    elif isinstance(value, Mapping):
        parts = [(f"[{key}]", item) for key, item in value.items]
    elif isinstance(value, Fields):
        parts = [(f".{n}", item) for n, item in zip(value.names, value.values, strict=True)]
    else:
        return []
    return [leaf for step, part in parts for leaf in _parts(part, path + step, leaves)]


def _places(run: Run, record: Record, leaves: tuple[type, ...] = _NUMBERS) -> list[tuple[str, Any]]:
    """The leaves of a record, each with its place in it."""
    file = record.tags.get("file")
    if file is None:
        return _parts(record.value, "", leaves)
    return _dumped(run.path / Path(file).name, leaves)


def _leaves(run: Run, record: Record) -> list[tuple[str, Any]]:
    """The arrays and numbers of a record, each under a name that no other one has."""
    key = _key(record, len(run.reader.ranks) > 1)
    return [
        (file_name(key + place), as_numpy(part) if isinstance(part, TensorData) else part)
        for place, part in _places(run, record)
    ]


def _dumped(path: Path, leaves: tuple[type, ...]) -> list[tuple[str, Any]]:
    """The leaves of a dumped file, if it holds nothing else and reading it runs no code."""
    try:
        found = load_file(path)
    except TensortapError:
        return []
    # copies: what is borrowed lives no longer than what was found
    return [(place, _copied(part)) for place, part in _parts(borrow(found), "", leaves)]


def _copied(part: Any) -> Any:
    if isinstance(part, TensorData):
        return msgspec.structs.replace(part, data=bytes(view_of(part.data)))
    return part


def _npz(run: Run, path: Path, records: Iterable[Record], names: set[str]) -> int:
    import zipfile

    import numpy

    count = 0
    draft = path.with_name(path.name + ".part")
    # one array at a time: numpy.savez would want all of them in memory
    with zipfile.ZipFile(draft, "w", allowZip64=True) as archive:
        for record in records:
            leaves = _leaves(run, record)
            for name, array in leaves:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    numpy.lib.format.write_array(stream, _plain(array), allow_pickle=False)
            count += bool(leaves)
    draft.replace(path)
    return count


def _plain(array: Any) -> Any:
    """An array that NumPy's file format can hold: other dtypes as their bits."""
    import numpy

    array = numpy.asarray(array)
    if array.dtype.kind == "V" or array.dtype.name not in numpy.sctypeDict:
        return array.view({1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(array.dtype.itemsize, "u1"))
    return array


def _folder(run: Run, path: Path, records: Iterable[Record], names: set[str]) -> int:
    import numpy

    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise TensortapError(f"{path} is not empty: export to an empty folder")
    count = 0
    for record in records:
        file = record.tags.get("file")
        if file is not None:
            shutil.copyfile(run.path / Path(file).name, path / Path(file).name)
            count += 1
            continue
        leaves = _leaves(run, record)
        for name, array in leaves:
            numpy.save(path / f"{name}.npy", _plain(array), allow_pickle=False)
        count += bool(leaves)
    return count


def _parquet(run: Run, path: Path, records: Iterable[Record], names: set[str]) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = run.reader.table()
    wanted = pc.is_in(table.column("name"), column(sorted(names), pa.string()))
    kept = table.filter(pc.and_(wanted, pc.invert(table.column("missing"))))
    draft = path.with_name(path.name + ".part")
    pq.write_table(kept, draft, compression="zstd")
    draft.replace(path)
    return int(kept.num_rows)


def _hdf5(run: Run, path: Path, records: Iterable[Record], names: set[str]) -> int:
    from tensortap.hdf5.values import can_hold
    from tensortap.hdf5.writer import Options, Writer

    count = 0
    writer = Writer(path, "refuse", Options())
    try:
        for record in records:
            beside = {"iterations": record.step, "ranks": record.rank, "calls": record.call}
            parts = [
                (place, part)
                for place, part in _places(run, record, (*_NUMBERS, Number, str))
                if can_hold(part)
            ]
            for place, part in parts:
                writer.append(_title(record) + place, part, beside)
            count += bool(parts)
        writer.close()
    finally:
        writer.abandon()
    return count
