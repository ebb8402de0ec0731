"""Rules over records: what is worth saying at once, said once.

    watcher = Watcher([nan(), exploding(factor=30)], on_alert="stop")
    watcher.see(record)      # for every record, in the order of capture
    watcher.check()          # where training may be stopped

A rule is a function of a record and of what it remembers of that tensor. It says what is wrong,
or None.
"""

from __future__ import annotations

from tensortap.alerts.alert import Alert, Finding, alert_of, record_of
from tensortap.alerts.monitor import Memory, Moment, Watcher
from tensortap.alerts.rules import (
    DEFAULT,
    Rule,
    constant,
    dead,
    exploding,
    inf,
    loss_spike,
    nan,
    saturated,
    vanishing,
)

__all__ = [
    "Alert",
    "DEFAULT",
    "Finding",
    "Memory",
    "Moment",
    "Rule",
    "Watcher",
    "alert_of",
    "constant",
    "dead",
    "exploding",
    "inf",
    "loss_spike",
    "nan",
    "record_of",
    "saturated",
    "vanishing",
]
