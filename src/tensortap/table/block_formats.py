"""Losses in a block format of those tensors of a run that were kept whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensortap.core.errors import NotFound
from tensortap.core.record import Kind, TensorData
from tensortap.runs.reader import value_of
from tensortap.stats.blocks import check_format, quantize_array
from tensortap.table.frames import chosen_rows
from tensortap.table.logframe_schema import need_pandas
from tensortap.values.view import as_numpy

if TYPE_CHECKING:
    import pandas as pd

    from tensortap.runs.run_reader import RunReader
    from tensortap.table.table import Table


def block_formats_of(
    reader: RunReader,
    table: Table,
    format: str,  # noqa: A002
    *,
    name: str | None = None,
    kind: Kind | str | None = None,
    step: int | str | None = None,
) -> pd.DataFrame:
    """Return one row per float tensor that was kept whole: `QuantizeError.totals` of its values.

    Blocks lie along the last axis. ``worst`` is the index of the worst block.
    """
    pd = need_pandas("run.formats()")
    check_format(format)
    keys, rows = chosen_rows(table, name, kind, step)
    heads = {
        (head.rank, head.seq): head
        for _, records in reader.by_name({table.names[n]: None for n in table.name[rows]})
        for head in records
    }
    found: list[dict[str, Any]] = []
    for key, row in zip(keys.to_dict("records"), rows.tolist(), strict=True):
        place = int(table.rank[row]), int(table.seq[row])
        value = value_of(reader.load(heads[place]))
        if not isinstance(value, TensorData) or not value.dtype.startswith(("float", "bfloat")):
            continue
        lost = quantize_array(as_numpy(value).reshape(value.shape or (1,)), format)
        found.append(
            {**key, "rank": place[0], "call": int(table.call[row]), "values": lost.values.size}
            | {**lost.totals(), "worst": lost.worst}
        )
    if not found:
        raise NotFound(
            f"no float tensor was kept whole, as {format} needs: tap.track(..., tensors=True) "
            "keeps them"
        )
    return pd.DataFrame(found)
