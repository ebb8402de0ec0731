"""The rows of a run as an Arrow dataset: read piece by piece, and only what a query needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.runs.rows import schema

if TYPE_CHECKING:
    import pyarrow.dataset as ds

    from tensortap.readers.run import RunReader


def dataset_of(reader: RunReader) -> ds.Dataset:
    """Return the records of all ranks as a dataset; dropped records are left out."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    columns = schema().remove_metadata()
    with reader.lock:
        parts = [str(part.path) for tables in reader.by_rank.values() for part in tables.parts]
        tails = [batch for tables in reader.by_rank.values() for batch in tables.tail]
    sealed = ds.dataset(parts, columns, "parquet")
    rows = pa.Table.from_batches([batch.select(columns.names) for batch in tails], columns)
    return ds.dataset([sealed, ds.dataset(rows)]).filter(~ds.field("missing"))
