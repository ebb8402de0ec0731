"""A run in another format: one file, or a folder of plain ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.arrays.view import as_numpy
from tensortap.errors import MissingExtra, TensortapError
from tensortap.formats.folders import file_name
from tensortap.record import Fields, Items, Mapping, Record, TensorData, Value

if TYPE_CHECKING:
    from tensortap.console.run import Run

Progress = Callable[[Iterable[Any], int], Any]


def export(
    run: Run, target: str | Path, *, names: str | None = None, progress: Progress | None = None
) -> int:
    """Write a run to ``.npz``, ``.h5``, ``.parquet`` or a folder; how many records it was."""
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
    heads = [record for name in wanted for record in run.reader.records(name)]
    shown = progress(heads, len(heads)) if progress is not None else heads
    return write(run, path, (run.reader.load(head) for head in shown), set(wanted))


def _key(record: Record, ranked: bool) -> str:
    rank = f"_rank{record.rank}" if ranked else ""
    call = f".{record.call}" if record.call else ""
    return f"{record.name}@{record.step}{call}{rank}"


def _arrays(value: Value, path: str = "") -> list[tuple[str, Any]]:
    """The arrays and numbers of a value, each with its place in it."""
    if isinstance(value, TensorData):
        return [(path, as_numpy(value))]
    if isinstance(value, (bool, int, float)):
        return [(path, value)]
    if isinstance(value, Items):
        parts = [(f"[{i}]", item) for i, item in enumerate(value.items)]
    elif isinstance(value, Mapping):
        parts = [(f"[{key}]", item) for key, item in value.items]
    elif isinstance(value, Fields):
        parts = [(f".{n}", item) for n, item in zip(value.names, value.values, strict=True)]
    else:
        return []
    return [leaf for step, part in parts for leaf in _arrays(part, path + step)]


def _npz(run: Run, path: Path, records: Iterable[Record], names: set[str]) -> int:
    import zipfile

    import numpy

    count, ranked = 0, len(run.reader.ranks) > 1
    draft = path.with_name(path.name + ".part")
    # one array at a time: numpy.savez would want all of them in memory
    with zipfile.ZipFile(draft, "w", allowZip64=True) as archive:
        for record in records:
            for place, array in _arrays(record.value):
                name = file_name(_key(record, ranked) + place)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    numpy.lib.format.write_array(stream, _plain(array), allow_pickle=False)
            count += 1
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
    count, ranked = 0, len(run.reader.ranks) > 1
    for record in records:
        for place, array in _arrays(record.value):
            target = path / f"{file_name(_key(record, ranked) + place)}.npy"
            if target.exists():
                raise TensortapError(f"{target} is there already: export to an empty folder")
            numpy.save(target, _plain(array), allow_pickle=False)
        count += 1
    return count


def _parquet(run: Run, path: Path, records: Iterable[Record], names: set[str]) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = run.reader.table()
    wanted = pc.is_in(table.column("name"), pa.array(sorted(names), pa.string()))
    kept = table.filter(pc.and_(wanted, pc.invert(table.column("missing"))))
    draft = path.with_name(path.name + ".part")
    pq.write_table(kept, draft, compression="zstd")
    draft.replace(path)
    return int(kept.num_rows)


def _hdf5(run: Run, path: Path, records: Iterable[Record], names: set[str]) -> int:
    try:
        import h5py
    except ImportError:
        raise MissingExtra("HDF5 needs h5py: pip install 'tensortap[hdf5]'") from None
    count, ranked = 0, len(run.reader.ranks) > 1
    draft = path.with_name(path.name + ".part")
    with h5py.File(draft, "w") as file:
        for record in records:
            for place, array in _arrays(record.value):
                group = file.require_group(file_name(record.name))
                data = group.create_dataset(
                    file_name(_key(record, ranked) + place), data=_plain(array)
                )
                data.attrs.update(
                    name=record.name, step=record.step, call=record.call, rank=record.rank,
                    kind=record.kind.value, dtype=record.dtype,
                )  # fmt: skip
            count += 1
    draft.replace(path)
    return count
