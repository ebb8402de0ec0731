"""The alerts of a run: those of training, those that rooms find, and those that rules raise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec
import numpy as np

from tensortap.alerts import Alert, AlertMonitor, Rule
from tensortap.core.rooms import offers
from tensortap.runs.rows import HEAD_COLUMNS, records_of
from tensortap.runs.run_reader import RunReader
from tensortap.table.columns import VALUE
from tensortap.table.table import Table

_CHUNK = 1 << 14  # rows of which records are made at a time


class AlertFinder(Protocol):
    """Finds alerts in the stored records of a table; rooms offer one as ``run.alerts``."""

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that apply to the table."""

    def get(self) -> list[Alert]:
        """Return the alerts, perhaps those of a little while ago."""


def alert_finders(table: Table) -> list[AlertFinder]:
    return [make(table) for make in offers("run.alerts")]


def run_alerts(
    table: Table, reader: object, finders: Iterable[AlertFinder] | None = None
) -> list[Alert]:
    """Return the alerts that training raised, and those that rooms find in a run, by step.

    A live session finds the latter by itself. `finders` are those of the table, if there are any.
    """
    alerts = table.alerts()
    if isinstance(reader, RunReader):
        finders = alert_finders(table) if finders is None else finders
        alerts += [alert for finder in finders for alert in finder.get()]
        for told in offers("run.alerts.told"):  # with what other ranks had
            alerts = told(alerts)
        alerts.sort(key=lambda alert: alert.step)
    return alerts


def rule_alerts(table: Table, rules: Iterable[Rule] | bool) -> list[Alert]:
    """Return the alerts that rules raise about whole tensors; True: all, and those of rooms."""
    with table.lock:
        finders = alert_finders(table) if rules is True else []
        alerts = [alert for finder in finders for alert in finder.get()]
        whole = table.whole()
        monitor = AlertMonitor(rules)
        order = np.lexsort((whole.rank, whole.seq, whole.step)) if monitor.rules else np.arange(0)
        for start in range(0, len(order), _CHUNK):
            chosen = order[start : start + _CHUNK]
            found = zip(
                records_of(whole.take(chosen, list(HEAD_COLUMNS))), whole.has_number(chosen),
                whole.column(VALUE)[chosen], strict=True,
            )  # fmt: skip
            for record, has_number, number in found:
                value = float(number) if has_number else None
                monitor.see(msgspec.structs.replace(record, value=value))
    return sorted([*monitor.alerts, *alerts], key=lambda alert: alert.step)
