"""The health of a run: one row per rule, worst first."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple

from tensortap.alerts import Alert, default_rules
from tensortap.alerts.alert import HINT, WHY
from tensortap.alerts.rules import ACTIVE_RULES
from tensortap.api.run_alerts import alert_finders, rule_alerts, run_alerts
from tensortap.rooms.health.advice import REMEDIES, looks_for
from tensortap.table.table import Table

State = Literal["problem", "hint", "fine", "unknown"]
_LIMITS = ("unseen", "remark")  # about what is observed, not about the training
_ORDER: tuple[State, ...] = ("problem", "hint", "fine", "unknown")


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
        active = {rule.__name__ for rule in default_rules() if not hasattr(rule, "of_steps")}
    active.update(rule for finder in alert_finders(table) for rule in finder.rules)
    return rows_of([*alerts, *table.alerts(HINT)], active)


def rows_of(alerts: Iterable[Alert], active: Collection[str]) -> list[RuleHealth]:
    """Return a row for each rule that raised an alert, was active, or is active by default.

    >>> [(row.rule, row.state) for row in rows_of([], ["dead"])][:2]
    [('dead', 'fine'), ('nan', 'unknown')]
    """
    found = collections.defaultdict(list)
    for alert in alerts:
        if alert.rule != WHY:  # it explains another one
            found[alert.rule].append(alert)
    default = (rule.__name__ for rule in default_rules())
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
    for record in reader.records(ACTIVE_RULES) if hasattr(reader, "load") else ():
        value = reader.load(record).value
        names.update(value.split() if isinstance(value, str) else ())
    return names
