"""The alerts of a run, and its health: one row per rule, worst first."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from tensortap.alerts import DEFAULT, Alert, AlertMonitor, Rule
from tensortap.alerts.alert import HINT, WHY
from tensortap.alerts.rules import RULES
from tensortap.rooms.health.advice import REMEDIES, looks_for
from tensortap.rooms.ranks import findings as ranks
from tensortap.runs.rows import HEAD_COLUMNS, records_of
from tensortap.runs.run_reader import RunReader
from tensortap.table.columns import VALUE
from tensortap.table.table import Table

State = Literal["problem", "hint", "fine", "unknown"]
_LIMITS = ("unseen", "remark")  # about what is observed, not about the training
_ORDER: tuple[State, ...] = ("problem", "hint", "fine", "unknown")
_CHUNK = 1 << 14  # rows of which records are made at a time


class RuleHealth(NamedTuple):
    """The findings of one rule in a run: its first alert, and the number of alerts.

    `state` is ``"unknown"`` if the rule was not active.
    """

    rule: str
    state: State
    looks_for: str
    remedy: str
    alerts: int = 0
    name: str = ""
    kind: str = ""
    step: int = 0
    rank: int = 0
    message: str = ""


def health_of(
    table: Table, reader: object, alerts: list[Alert] | None = None, *, compute: bool = False
) -> list[RuleHealth]:
    """Return one row per rule with its findings, worst first.

    `alerts` are those of the run, if they are known. `compute` applies the rules over statistics
    to a run in which no rule was active.
    """
    active = _active_rules(reader)
    alerts = run_alerts(table, reader) if alerts is None else list(alerts)
    if compute and not active:
        alerts += rule_alerts(table, True)
        active = {rule.__name__ for rule in DEFAULT if not hasattr(rule, "of_steps")}
    if len(table.ranks()) > 1:
        active |= {*ranks.RULES}
    return rows_of([*alerts, *table.alerts(HINT)], active)


def run_alerts(
    table: Table, reader: object, found: Iterable[ranks.RankFinding] | None = None
) -> list[Alert]:
    """Return the alerts that training raised, and those about the ranks of a run, by step.

    A live session raises the latter by itself. `found` are the findings, if they are known.
    """
    alerts = table.alerts()
    if isinstance(reader, RunReader) and len(reader.ranks) > 1:
        alerts += [each.alert for each in (ranks.rank_findings(table) if found is None else found)]
        alerts.sort(key=lambda alert: alert.step)
    return alerts


def rule_alerts(table: Table, rules: Iterable[Rule] | bool) -> list[Alert]:
    """Return the alerts that rules raise about whole tensors; True: all rules, and about ranks."""
    with table.lock:
        alerts = [each.alert for each in ranks.rank_findings(table)] if rules is True else []
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


def rows_of(alerts: Iterable[Alert], active: Collection[str]) -> list[RuleHealth]:
    """Return a row for each rule that raised an alert, was active, or is active by default.

    >>> [(row.rule, row.state) for row in rows_of([], ["dead"])][:2]
    [('dead', 'fine'), ('nan', 'unknown')]
    """
    found = collections.defaultdict(list)
    for alert in alerts:
        if alert.rule != WHY:  # it explains another one
            found[alert.rule].append(alert)
    default = (rule.__name__ for rule in DEFAULT)
    names = dict.fromkeys([*found, *default, *sorted(active)])
    rows = [_row(rule, found[rule], rule in active) for rule in names]
    return sorted(rows, key=lambda row: _ORDER.index(row.state))


def _row(rule: str, alerts: list[Alert], is_active: bool) -> RuleHealth:
    words = looks_for(rule), REMEDIES.get(rule, "")
    if not alerts:
        return RuleHealth(rule, "fine" if is_active else "unknown", *words)
    problems = [alert for alert in alerts if alert.severity != HINT and rule not in _LIMITS]
    first = min(problems or alerts, key=lambda alert: alert.step)
    return RuleHealth(
        rule, "problem" if problems else "hint", *words, len(alerts), first.name,
        first.kind.value, first.step, first.rank, first.message,
    )  # fmt: skip


def _active_rules(reader: Any) -> set[str]:
    """Return the rules that were active in any rank of a run or a live session."""
    names: set[str] = set()
    for record in reader.records(RULES) if hasattr(reader, "load") else ():
        value = reader.load(record).value
        names.update(value.split() if isinstance(value, str) else ())
    return names
