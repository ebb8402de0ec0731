"""The left of the page: what is shown, the names in it, and which tensors are there whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.formats.columns import numbers
from tensortap.readers.live import LiveReader
from tensortap.readers.run import RunReader
from tensortap.record import Kind, Record
from tensortap.web.asked import Asked
from tensortap.web.shown import Shown, described

if TYPE_CHECKING:
    from tensortap.viz.table import Table

_HELD = 5000  # names with tensors that are told


def library(asked: Asked) -> dict[str, Any]:
    """Everything that can be looked at."""
    asked.place.library.scan()
    return {"shown": [described(shown) for shown in asked.place.library.all()]}


def run(asked: Asked) -> dict[str, Any]:
    """What a run is made of: names with their kinds, ranks, steps, statistics."""
    shown = asked.shown
    table = shown.table()
    with table.lock:
        return _run(shown, table)


def _run(shown: Shown, table: Table) -> dict[str, Any]:
    kinds = table.tensor_kinds()
    of_name: dict[str, list[int]] = {}
    for number, kind in enumerate(kinds):
        for name in table.layers(kind):
            of_name.setdefault(name, []).append(number)
    order = {name: number for number, name in enumerate(table.names)}
    names = sorted(of_name, key=order.__getitem__)
    return {
        **described(shown),
        "records": len(table),
        "kinds": kinds,
        "names": names,
        "name_kinds": [of_name[name] for name in names],
        "ranks": table.ranks(),
        "statistics": table.statistics(),
        "dtypes": [dtype for dtype in table.dtypes if dtype],
        "metrics": table.layers(Kind.METRIC.value),
        "steps": table.steps(),
    }


def held(asked: Asked) -> dict[str, Any]:
    """Which tensors were kept whole, not only their statistics: by name and kind, their steps."""
    reader: Any = asked.shown.reader()
    found = _held_in_run(reader) if isinstance(reader, RunReader) else _held_live(reader)
    rows = [
        {"name": name, "kind": kind, "steps": sorted(steps)}
        for (name, kind), steps in list(found.items())[:_HELD]
    ]
    return {"total": len(found), "held": rows}


def _held_in_run(reader: RunReader) -> dict[tuple[str, str], set[int]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = ["name", "kind", "step", "dtype", "value", "payloads", "tags", "missing", "count"]
    found: dict[tuple[str, str], set[int]] = {}
    for table in reader.tables(columns):
        # a value of one byte is None: only statistics. A tensor has a dtype, or lies in a file
        inline = numbers(pc.binary_length(table.column("value"))) > 1
        inline &= numbers(pc.utf8_length(table.column("dtype"))) > 0
        apart = numbers(pc.list_value_length(table.column("payloads"))) > 0
        bare = np.isnan(numbers(table.column("count")))
        here = ~numbers(pc.cast(table.column("missing"), pa.int8())).astype(bool)
        rows = table.take(pa.array(np.flatnonzero((inline | apart | bare) & here)))
        sure = (inline | apart)[(inline | apart | bare) & here].tolist()
        words = (rows.column(name).to_pylist() for name in ("name", "kind", "step", "tags"))
        for name, kind, step, tags, whole in zip(*words, sure, strict=True):
            # what was dumped is a file beside the tables
            if kind != Kind.ALERT.value and (whole or "file" in dict(tags or ())):
                found.setdefault((name, kind), set()).add(step)
    return found


def _held_live(reader: Any) -> dict[tuple[str, str], set[int]]:
    far = isinstance(reader, LiveReader)  # its records come without values
    found: dict[tuple[str, str], set[int]] = {}
    for name in reader.names():
        for record in reader.records(name):
            if _has_tensor(record, far):
                found.setdefault((name, record.kind.value), set()).add(record.step)
    return found


def _has_tensor(record: Record, far: bool) -> bool:
    if record.kind in (Kind.ALERT, Kind.METRIC):
        return False
    if far:
        return bool(record.dtype) and record.stats is None
    return record.value is not None and not isinstance(record.value, (bool, int, float, str))
