"""Alerts: rules that check every record and report each problem once.

    monitor = AlertMonitor([nan(), exploding(factor=30)], on_alert="stop")
    monitor.see(record)      # for every record, in the order of capture
    monitor.check()          # where training may be stopped

A rule is a function of a record and of the state it keeps for that tensor. It returns a message,
a `Finding`, or None. Rules of rooms are here, too, under their names: ``alerts.no_gradient()``.
"""

from __future__ import annotations

import sys
from typing import Any

from tensortap.alerts.alert import Alert, Finding, alert_of, record_of
from tensortap.alerts.monitor import AlertMonitor, RuleState, StepState
from tensortap.alerts.rules import (
    Rule,
    constant,
    dead,
    default_rules,
    exploding,
    inf,
    nan,
    saturated,
    vanishing,
)
from tensortap.core.rooms import load, rooms

__all__ = [
    "Alert",
    "AlertMonitor",
    "Finding",
    "Rule",
    "RuleState",
    "StepState",
    "alert_of",
    "constant",
    "dead",
    "default_rules",
    "exploding",
    "inf",
    "nan",
    "record_of",
    "saturated",
    "vanishing",
]


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for room in rooms().values():
            if room.rules is not None and name in {rule.__name__ for rule in load(room.rules)}:
                return load(f"{room.rules.partition(':')[0]}:{name}")
    here = sys.modules[__name__]  # for "Did you mean"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=here)


def __dir__() -> list[str]:
    return sorted({*globals(), *(rule.__name__ for rule in default_rules())})
