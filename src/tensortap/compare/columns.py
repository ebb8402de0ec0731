"""The records of a run, or of whatever reads like one, as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensortap.readers.run import RunReader
from tensortap.record import Kind, Record
from tensortap.runs import rows as run_rows

if TYPE_CHECKING:
    import pyarrow as pa

KEY = ("name", "kind", "step", "call", "rank")
"""What two records must have in common to be compared."""

_CELLS = ("digest", "value", "payloads")
COLUMNS = [
    *KEY, "seq", "dtype", "shape", "shard_shape", "shard_offsets", "shard_placements", "tags",
    *_CELLS, *run_rows.STATISTICS, "missing",
]  # fmt: skip


def heads_of(reader: RunReader) -> pa.Table:
    """All records, a row each; those that were dropped when they were captured are not there."""
    import pyarrow.compute as pc

    table = reader.table(COLUMNS)
    return table.filter(pc.invert(table.column("missing"))).drop_columns(["missing"])


def heads_of_records(records: list[Record]) -> pa.Table:
    """The same of records that lie elsewhere."""
    import pyarrow as pa

    schema = run_rows.schema()
    rows = [run_rows.row_of(record, None, []) for record in records]
    batches = [run_rows.batch_of(rows, schema)] if rows else []
    table = pa.Table.from_batches(batches, schema)
    return table.select(COLUMNS).drop_columns(["missing"])


def stub(row: dict[str, Any]) -> Record:
    """Enough of a record for a reader to load the rest."""
    return Record(
        row["name"], Kind(row["kind"]), row["step"], row["call"], row["seq"], row["rank"], 1, 0,
        tags=dict(row["tags"] or ()),
    )  # fmt: skip
