"""Exports of a run: one file, or a folder of plain ones."""

from __future__ import annotations

import collections
import shutil
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensortap.core.arguments import check_path
from tensortap.core.buffers import view_of
from tensortap.core.errors import TensortapError
from tensortap.core.files import check_regular
from tensortap.core.patterns import compile_pattern
from tensortap.core.record import Kind, Record, TensorData
from tensortap.core.values import leaves
from tensortap.runs.arrow import column
from tensortap.runs.folders import file_name
from tensortap.values.snapshot import borrow
from tensortap.values.view import as_numpy

if TYPE_CHECKING:
    from tensortap.api.run import Run

Progress = Callable[[Iterable[Any], int], Any]
Leaves = list[tuple[str, Any]]
_NUMBERS = (TensorData, bool, int, float)
_REPEAT = "~repeat"  # tag of a record whose step was already recorded


def export(
    run: Run, target: str | Path, *, names: str | None = None, progress: Progress | None = None
) -> int:
    """Write a run to ``.npz``, ``.parquet`` or a folder; return how many records.

    Records without an array or a number (texts, statistics, dumped objects) are only in
    ``.parquet`` and, as copies of dumped files, in a folder.
    """
    check_path("target", target)
    path = Path(target)
    write = {".npz": _npz, ".parquet": _parquet}.get(path.suffix, _folder)
    if write is _folder and path.suffix and not path.is_dir():
        raise TensortapError(f"target must be .npz, .parquet or a folder, got {path.suffix!r}")
    if path.exists() and not path.is_dir():
        raise TensortapError(f"{path} exists: remove it, or choose another name")
    pattern = compile_pattern(names or "")
    wanted = [name for name in run.names() if pattern.search(name)]
    heads = [record for _, records in run.reader.by_name(wanted) for record in records]
    tracked = progress(heads, len(heads)) if progress is not None else heads
    counts: collections.Counter[tuple[object, ...]] = collections.Counter()
    try:
        return write(run, path, (_load(run, head, counts) for head in tracked), set(wanted))
    except BaseException:
        _draft(path).unlink(missing_ok=True)
        raise


def _draft(path: Path) -> Path:
    """Return the file that gets the name of a target when it is complete."""
    return path.with_name(path.name + ".part")


def _load(run: Run, head: Record, counts: collections.Counter[tuple[object, ...]]) -> Record:
    """Return a record with its value; tag it if its step was recorded before."""
    key = (head.name, head.kind, head.step, head.call, head.rank)
    repeat, counts[key] = counts[key], counts[key] + 1
    record = run.reader.load(head)
    if not repeat:
        return record
    return msgspec.structs.replace(record, tags={**record.tags, _REPEAT: str(repeat)})


def _title(record: Record) -> str:
    """Return the name of a record, with its kind unless it is a value."""
    return record.name if record.kind is Kind.VALUE else f"{record.name}.{record.kind.value}"


def _numbers(run: Run, record: Record) -> Leaves:
    """Return the arrays and numbers in the value of a record, each with its path."""
    value = record.value
    file = record.tags.get("file")
    if file is not None:
        try:
            loaded = run.reader.load_file(file)
        except TensortapError:  # reading it could run code
            return []
        value = borrow(loaded)
    wanted = [(path, leaf) for path, leaf in leaves(value, key=str) if isinstance(leaf, _NUMBERS)]
    # a borrowed tensor is valid only as long as the loaded object
    return wanted if file is None else [(path, _copy(leaf)) for path, leaf in wanted]


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, TensorData):
        return msgspec.structs.replace(leaf, data=bytes(view_of(leaf.data)))
    return leaf


def _arrays(run: Run, record: Record) -> Leaves:
    """Return the arrays and numbers of a record, each with a unique file name."""
    rank = f"_rank{record.rank}" if len(run.reader.ranks) > 1 else ""
    call = f".{record.call}" if record.call else ""
    repeat = f"~{record.tags[_REPEAT]}" if _REPEAT in record.tags else ""
    key = f"{_title(record)}@{record.step}{call}{repeat}{rank}"
    return [
        (file_name(key + path), _storable(as_numpy(leaf) if isinstance(leaf, TensorData) else leaf))
        for path, leaf in _numbers(run, record)
    ]


def _storable(array: Any) -> Any:
    """Return an array that NumPy's file format can hold; other dtypes as unsigned integers."""
    import numpy

    array = numpy.asarray(array)
    if array.dtype.kind == "V" or array.dtype.name not in numpy.sctypeDict:
        return array.view({1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(array.dtype.itemsize, "u1"))
    return array


def _npz(run: Run, path: Path, records: Iterable[Record], names: set[str]) -> int:
    import numpy

    count = 0
    # one array at a time: numpy.savez needs all of them in memory
    with zipfile.ZipFile(_draft(path), "w", allowZip64=True) as archive:
        for record in records:
            arrays = _arrays(run, record)
            for name, array in arrays:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    numpy.lib.format.write_array(stream, array, allow_pickle=False)
            count += bool(arrays)
    _draft(path).replace(path)
    return count


def _folder(run: Run, path: Path, records: Iterable[Record], names: set[str]) -> int:
    import numpy

    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise TensortapError(f"{path} is not empty: export to an empty folder")
    count = 0
    for record in records:
        file = record.tags.get("file")
        if file is not None:
            source = run.reader.file(file)
            check_regular(source)
            shutil.copyfile(source, path / source.name)
            count += 1
            continue
        arrays = _arrays(run, record)
        for name, array in arrays:
            numpy.save(path / f"{name}.npy", array, allow_pickle=False)
        count += bool(arrays)
    return count


def _parquet(run: Run, path: Path, records: Iterable[Record], names: set[str]) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = run.reader.table()
    wanted = pc.is_in(table.column("name"), column(sorted(names), pa.string()))
    kept = table.filter(pc.and_(wanted, pc.invert(table.column("missing"))))
    pq.write_table(kept, _draft(path), compression="zstd")
    _draft(path).replace(path)
    return int(kept.num_rows)
