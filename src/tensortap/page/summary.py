"""The route for the verdict on a run: its state, the last numbers, and what rules found first."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import numpy as np

from tensortap.alerts.alert import HINT, WHY, Alert
from tensortap.alerts.rules import LIMITS, active_rules
from tensortap.core.rooms import offers
from tensortap.page.catalog import CatalogEntry, SessionEntry
from tensortap.page.responses import PageRequest, PageRoute
from tensortap.table.table import Table

_MAX_METRICS = 3
_MAX_UNSEEN = 20


def summary(request: PageRequest) -> dict[str, Any]:
    """Return the state of a run, how long it took, its last numbers, and the first problem."""
    entry = request.entry
    table = entry.table()
    steps = table.steps()
    steps = steps[steps >= 0]  # initial weights are those of step -1
    hints = table.alerts(HINT)
    unseen = [alert for alert in hints if alert.rule in LIMITS]
    problems = [a for a in entry.alerts() if a.rule != WHY and a.rule not in LIMITS]
    first = min(problems, key=lambda alert: alert.step, default=None)
    return {
        "state": entry.state,
        "steps": len(steps),
        "last_step": int(steps[-1]) if len(steps) else None,
        "seconds": _duration(entry),
        "metrics": _last_numbers(table),
        "rules": len(active_rules(entry.reader())),
        "problems": len(problems),
        "problem_rules": len({alert.rule for alert in problems}),
        "first": None if first is None else _row(first),
        "hints": len(hints) - len(unseen),
        "unseen": [_row(alert) for alert in unseen[:_MAX_UNSEEN]],
        "unseen_total": len(unseen),
    }


def _duration(entry: CatalogEntry) -> float:
    """Return the seconds from the start of a run to its end, or until it was last written to."""
    if isinstance(entry, SessionEntry):
        return max(0.0, time.time() - entry.overview().started)
    info = entry.reader().info
    ended = (
        entry.last_written if info.ended is None else datetime.fromisoformat(info.ended).timestamp()
    )
    return max(0.0, ended - datetime.fromisoformat(info.started).timestamp())


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


ROUTES = (PageRoute("summary", summary),)
