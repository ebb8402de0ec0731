"""Routes for the list of runs, and for the verdict, names, alerts and receipt of one run."""

from __future__ import annotations

import collections
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.compute as pc

from tensortap.alerts.alert import HINT, WHY, Alert
from tensortap.alerts.rules import LIMITS, active_rules
from tensortap.capture.pipeline import pipeline
from tensortap.core.record import Kind
from tensortap.core.rooms import offers
from tensortap.page.catalog import (
    CatalogEntry,
    RunEntry,
    SessionEntry,
    describe_entry,
    signature_of,
)
from tensortap.page.responses import PageRequest, PageRoute
from tensortap.runs.run_reader import RunReader
from tensortap.table.table import Table

_MAX_TENSORS = 5000
_MAX_ALERTS = 2000
_MAX_METRICS = 3
_MAX_UNSEEN = 20
_LARGE = 1 << 28  # bytes of tables: the list of runs does not read larger ones
_ALERT = ("rule", "name", "step", "rank", "module", "message", "origin", "again")


def catalog(request: PageRequest) -> dict[str, Any]:
    """Return all runs and live sessions."""
    request.context.catalog.scan()
    return {"entries": [describe_entry(entry) for entry in request.context.catalog.entries()]}


def run(request: PageRequest) -> dict[str, Any]:
    """Return the names of a run with their kinds, its ranks, steps and statistics."""
    entry = request.entry
    table = entry.table()
    with table.lock:
        index, kinds = table.index(), table.tensor_kinds()
        kinds += [each for each in (Kind.HEALTH.value, Kind.OP.value) if each in index.kinds]
        kinds_of: dict[str, list[int]] = {}
        for number, kind in enumerate(kinds):
            for name in table.layers(kind):
                kinds_of.setdefault(name, []).append(number)
        names = [name for name in index.names if name in kinds_of]
        return {
            **describe_entry(entry),
            "records": table.records(),
            "kinds": kinds,
            "names": names,
            "name_kinds": [kinds_of[name] for name in names],
            "ranks": table.ranks(),
            "statistics": table.statistics(),
            "steps": table.steps(),
        }


def tensor_steps(request: PageRequest) -> dict[str, Any]:
    """Return which tensors were kept whole: names, kinds and steps."""
    tensors = [
        {"name": name, "kind": kind, "steps": sorted(steps)}
        for (name, kind), steps in request.entry.tensor_steps().items()
    ]
    return {"total": len(tensors), "tensors": tensors[:_MAX_TENSORS]}


def alerts(request: PageRequest) -> dict[str, Any]:
    """Return the alerts in order of capture; if there are very many, the first and the last."""
    found = request.entry.alerts()
    half = _MAX_ALERTS // 2
    shown = found if len(found) <= _MAX_ALERTS else [*found[:half], *found[-half:]]
    rows = [
        {"kind": alert.kind.value, **{key: getattr(alert, key) for key in _ALERT}}
        for alert in shown
    ]
    for explain in offers("page.verdicts"):  # adds to each row which verdict explains it
        explain(found, zip(shown, rows, strict=True))
    problems = sum(alert.rule not in (WHY, *LIMITS) for alert in found)
    return {"total": len(found), "problems": problems, "alerts": rows}


# -- summary -------------------------------------------------------------------------------


def summary(request: PageRequest) -> dict[str, Any]:
    """Return what the tab Summary shows."""
    return summary_of(request.entry)


def summary_of(entry: CatalogEntry) -> dict[str, Any]:
    """Return the state of a run, how long it took, its last numbers, and the first problem."""
    table = entry.table()
    steps = table.steps()
    steps = steps[steps >= 0]  # initial weights are those of step -1
    hints = table.alerts(HINT)
    found = [alert for alert in entry.alerts() if alert.rule != WHY]
    problems = [alert for alert in found if alert.rule not in LIMITS]
    unseen = [alert for alert in (*found, *hints) if alert.rule in LIMITS]
    first = min(problems, key=lambda alert: alert.step, default=None)
    return {
        "state": entry.state,
        "crashed": entry.facts().get("crashed", "") if isinstance(entry, RunEntry) else "",
        "steps": len(steps),
        "last_step": int(steps[-1]) if len(steps) else None,
        "seconds": _duration(entry),
        "metrics": _last_numbers(table),
        "rules": len(active_rules(entry.reader())),
        "problems": len(problems),
        "problem_rules": len({alert.rule for alert in problems}),
        "first": None if first is None else _row(first),
        "hints": sum(alert.rule not in LIMITS for alert in hints),
        "unseen": [_row(alert) for alert in unseen[:_MAX_UNSEEN]],
        "unseen_total": len(unseen),
    }


def _duration(entry: CatalogEntry) -> float:
    """Return the seconds from the start of a run to its end, or until it was last written to."""
    if isinstance(entry, SessionEntry):
        return max(0.0, time.time() - entry.overview().started)
    return float(entry.facts().get("seconds", 0.0))


def brief(request: PageRequest) -> dict[str, Any]:
    """Return the last number of the loss, and the number of alerts, for the list of runs."""
    entry = request.context.catalog.peek(request.text("run"))
    if not isinstance(entry, RunEntry) or entry.state in ("unreadable", "deleted"):
        return {}
    if sum(size for _, size, _ in signature_of(entry.path)) > _LARGE:
        return {}
    table = entry.peek()
    alerts = [alert for alert in table.alerts() if alert.rule not in (WHY, *LIMITS)]
    losses = [each for each in _last_numbers(table) if "loss" in each["name"].lower()]
    return {"loss": losses[:1], "alerts": len(alerts)}


def _last_numbers(table: Table) -> list[dict[str, Any]]:
    """Return the last value of the training curves, the loss first."""
    curves: dict[str, Any] = next((make(table) for make in offers("page.curves")), {})
    names = sorted(curves, key=lambda name: "loss" not in name.lower())[:_MAX_METRICS]
    last = ((name, curves[name][0][-1], curves[name][1][-1]) for name in names)
    return [
        {
            "name": name,
            "step": int(step),
            "value": float(value) if np.isfinite(value) else f"{value}",
        }
        for name, step, value in last
    ]


def _row(alert: Alert) -> dict[str, Any]:
    keys = ("rule", "name", "step", "rank", "message", "origin")
    return {"kind": alert.kind.value, **{key: getattr(alert, key) for key in keys}}


# -- receipt ---------------------------------------------------------------------------------


def receipt(request: PageRequest) -> dict[str, Any]:
    """Return what capturing cost, what was dropped, and how fast records came."""
    entry = request.entry
    if not isinstance(entry, SessionEntry):
        return _receipt_of_run(entry.reader(), entry.table())
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
        "clients": msgspec.to_builtins(overview.clients),
        "cost": None if entry.server is None else msgspec.to_builtins(pipeline.receipt()),
    }


def _receipt_of_run(reader: RunReader, table: Table) -> dict[str, Any]:
    steps, dropped = table.steps(), reader.missing()
    columns = [cells.column(0) for cells in table.index().read(["time_ns"])]
    times = [time for each in columns for time in pc.min_max(each).as_py().values()]
    return {
        "live": False,
        "records": table.records(),
        "ranks": len(reader.ranks),
        "world_size": reader.info.world_size,
        "nbytes": {part: _folder_size(reader.path / part) for part in ("records", "tensors")},
        "seconds": (max(times) - min(times)) / 1e9 if times else 0.0,
        "steps": int(steps[-1] - steps[0]) + 1 if len(steps) else 0,
        "dropped": len(dropped),
        "dropped_names": collections.Counter(name for name, _, _ in dropped).most_common(50),
        "truncated": sum(reader.truncated.values()),
        "cost": _cost_of_run(reader),
    }


def _cost_of_run(reader: RunReader) -> dict[str, Any] | None:
    """Return the receipt of the rank that paid most; None if the run has not ended."""
    from tensortap.runs.init import opened

    run = opened()
    if run is not None and run.path.resolve() == reader.path.resolve():
        return dict(msgspec.to_builtins(pipeline.receipt()))
    receipts = reader.receipts()
    if not receipts:
        return None
    rank = max(receipts, key=lambda each: receipts[each].seconds)
    return {**msgspec.to_builtins(receipts[rank]), "rank": rank if len(receipts) > 1 else None}


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


ROUTES = (
    PageRoute("catalog", catalog, cached=False),
    PageRoute("brief", brief, cached=False),
    PageRoute("run", run),
    PageRoute("summary", summary),
    PageRoute("tensor_steps", tensor_steps),
    PageRoute("alerts", alerts),
    PageRoute("receipt", receipt, cached=False),
)
