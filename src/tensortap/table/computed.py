"""The table of a run with statistics for tensors that were recorded without any."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tensortap.frameworks.view import as_numpy
from tensortap.readers.run import RunReader
from tensortap.record import Record, Summary, TensorData, Value
from tensortap.runs.rows import number_of
from tensortap.stats import summarize_array
from tensortap.table.frames import tensors_without_statistics
from tensortap.table.table import Table, table_of


def complete_table(reader: RunReader) -> Table:
    """Return the table of a run; compute the statistics that were not recorded."""
    table = table_of(reader)
    table.append(_summarized(reader, tensors_without_statistics(table)))
    return table


def _summarized(reader: RunReader, keys: list[tuple[str, int, int]]) -> Iterator[Record]:
    """Yield records by (name, rank, seq) with statistics, and with a value only if a number."""
    names = dict.fromkeys(name for name, _, _ in keys)
    heads = {(r.rank, r.seq): r for _, records in reader.by_name(names) for r in records}
    for _, rank, seq in keys:
        head = heads[rank, seq]
        value = reader.load(head).value
        yield msgspec.structs.replace(head, stats=_summary(value), value=number_of(value))


def _summary(value: Value) -> Summary | None:
    try:
        return summarize_array(as_numpy(value)) if isinstance(value, TensorData) else None
    except TypeError:  # dates and strings
        return None
