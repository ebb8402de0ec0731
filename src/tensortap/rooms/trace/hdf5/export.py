"""The export of a run as HDF5."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tensortap.api.run import Run
from tensortap.core.record import Number, Record
from tensortap.rooms.export.export import NUMBERS, draft, leaves_of, title_of
from tensortap.rooms.trace.hdf5.values import can_store
from tensortap.rooms.trace.hdf5.writer import HDF5Options, HDF5Writer


def export_hdf5(run: Run, path: Path, records: Iterable[Record], names: set[str]) -> int:
    """Write arrays, numbers and texts as `tap.HDF5` does; return how many records."""
    count = 0
    writer = HDF5Writer(draft(path), "replace", HDF5Options())
    try:
        for record in records:
            columns = {"iterations": record.step, "ranks": record.rank, "calls": record.call}
            found = leaves_of(run, record, (*NUMBERS, Number, str))
            storable = [(place, leaf) for place, leaf in found if can_store(leaf)]
            for place, leaf in storable:
                writer.append(title_of(record) + place, leaf, columns)
            count += bool(storable)
    finally:
        writer.close()
    draft(path).replace(path)
    return count


FORMATS = {".h5": export_hdf5, ".hdf5": export_hdf5}
