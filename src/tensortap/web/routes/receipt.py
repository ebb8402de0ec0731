"""The tab Receipt."""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.compute as pc

from tensortap.pipeline.pipeline import pipeline
from tensortap.readers.run import RunReader
from tensortap.web.catalog_entries import CatalogEntry, SessionEntry
from tensortap.web.responses import PageRequest


def receipt(request: PageRequest) -> dict[str, Any]:
    """Return what capturing cost, what was dropped, and how fast records came."""
    entry = request.entry
    reader = entry.reader()
    if isinstance(reader, RunReader):
        return _receipt_of_run(reader)
    assert isinstance(entry, SessionEntry)
    overview = entry.overview()
    return {
        "live": True,
        "records": overview.written,
        "nbytes": overview.written_nbytes,
        "held_nbytes": overview.nbytes,
        "bound": overview.bound,
        "evicted": overview.evicted,
        "rejected": overview.rejected,
        "seconds": max(0.0, time.time() - overview.started),
        "clients": clients(entry),
        "cost": _cost_here() if entry.server is not None else None,
    }


def clients(entry: CatalogEntry) -> list[dict[str, Any]]:
    """Return the training processes that are connected to a live session."""
    assert isinstance(entry, SessionEntry)
    return [msgspec.to_builtins(client) for client in entry.overview().clients]


def _receipt_of_run(reader: RunReader) -> dict[str, Any]:
    table = reader.table(["time_ns", "step", "missing"])
    times, steps = (pc.min_max(table.column(name)).as_py() for name in ("time_ns", "step"))
    is_empty = not table.num_rows
    dropped = reader.missing() if pc.any(table.column("missing")).as_py() else []
    return {
        "live": False,
        "records": table.num_rows - len(dropped),
        "names": len(reader.counts()),
        "ranks": len(reader.ranks),
        "world_size": reader.info.world_size,
        "nbytes": {part: _folder_size(reader.path / part) for part in ("records", "tensors")},
        "seconds": 0.0 if is_empty else (times["max"] - times["min"]) / 1e9,
        "steps": 0 if is_empty else steps["max"] - steps["min"] + 1,
        "dropped": len(dropped),
        "dropped_names": collections.Counter(name for name, _, _ in dropped).most_common(50),
        "truncated": sum(reader.truncated.values()),
        "cost": _cost_of_run(reader),
    }


def _cost_here() -> dict[str, Any]:
    return dataclasses.asdict(pipeline.receipt())


def _cost_of_run(reader: RunReader) -> dict[str, Any] | None:
    """Return the receipt of the rank that paid most; None if the run has not ended."""
    from tensortap.sources.init import opened

    run = opened()
    if run is not None and run.path.resolve() == reader.path.resolve():
        return _cost_here()
    receipts = reader.receipts()
    if not receipts:
        return None
    rank = max(receipts, key=lambda each: receipts[each].seconds)
    return {**dataclasses.asdict(receipts[rank]), "rank": rank if len(receipts) > 1 else None}


def _folder_size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    total = 0
    for where, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue  # a tail that is sealed, and so renamed, at this moment
    return total
