"""The alerts of one tracker."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tensortap.alerts import Alert, AlertMonitor, record_of
from tensortap.alerts.alert import HINT
from tensortap.alerts.rules import ACTIVE_RULES, Rule
from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.record import Kind, Record
from tensortap.rooms.track.budget import Budget
from tensortap.rooms.track.options import TrackOptions
from tensortap.rooms.track.tracked_records import TrackedRecords

log = logging.getLogger("tensortap")


class TrackedAlerts:
    """Shows records and steps to the rules, and records the alerts that they raise.

    `hand_over` sends what was observed before an alert gets its `seq`.
    """

    def __init__(
        self,
        options: TrackOptions,
        records: TrackedRecords,
        hand_over: Callable[[], None],
        budget: Budget | None = None,
    ) -> None:
        self.alerts: collections.deque[Alert] = collections.deque(maxlen=1000)
        self.hints: collections.deque[Alert] = collections.deque(maxlen=1000)
        self._records, self._hand_over = records, hand_over
        self._reported: set[tuple[str, str]] = set()  # rules and names
        self._monitor: AlertMonitor | None = None
        self._on_alert = options.on_alert
        self.budget = budget
        self.prefix = ""  # of all names; a budget does not see it
        if options.has_rules:
            self._monitor = AlertMonitor(options.alerts, on_alert=options.on_alert)

    @property
    def looks(self) -> bool:
        """Return whether any rules look at records."""
        return self._monitor is not None

    @property
    def rules(self) -> Sequence[Rule]:
        """The rules that look at records and steps."""
        return self._monitor.rules if self._monitor is not None else ()

    def change_rules(self, names: Sequence[Any]) -> None:
        """Use these rules from now on; raise if one is unknown."""
        self._monitor = AlertMonitor(list(names), on_alert=self._on_alert) if names else None

    def begin(self, step: int) -> None:
        """Record which rules there are."""
        if self._monitor is not None:
            rank, world_size = ranks.rank_and_world_size()
            record = Record(
                ACTIVE_RULES, Kind.VALUE, step, 0, pipeline.next_seq(), rank, world_size,
                time.time_ns(), "builtins.str",
                value=" ".join(rule.__name__ for rule in self.rules),
            )  # fmt: skip
            self._records.offer(record)

    def keeps_whole(self, record: Record) -> bool:
        """Return whether an alert asked for whole tensors from this step on."""
        return self._monitor is not None and self._monitor.keep(record.step, record.rank)

    def see(self, record: Record) -> None:
        """Show a record to the rules."""
        if self._monitor is not None:
            for alert in self._monitor.see(record):
                self._record(alert, record.world_size)
            if suspected := self._monitor.suspected:
                self._monitor.suspected = set()
                if self.budget is not None:
                    for kind, name in suspected:
                        self.budget.hurry(kind, name.removeprefix(self.prefix))

    def raise_alert(self, alert: Alert, prefix: str) -> None:
        """Take an alert that a listener has raised."""
        alert = msgspec.structs.replace(alert, name=prefix + alert.name)
        if alert.severity == HINT:  # no reason to stop, or to keep tensors
            log.info("tensortap: %s", alert)
        elif self._monitor is not None:
            self._monitor.add(alert)
        self._record(alert, ranks.rank_and_world_size()[1])

    def end_step(self, skipped: Callable[[], bool] | None) -> None:
        """Stop here, where training may be stopped, if an alert asked for it."""
        if self._monitor is not None:
            self._monitor.check(skipped or (lambda: False))

    def report(
        self, rule: str, found: Mapping[str, str], step: int, prefix: str, title: str = ""
    ) -> None:
        """Log new reasons by name, and record an alert for each name."""
        new = [name for name in found if (rule, name) not in self._reported]
        if not new:
            return
        self._reported.update((rule, name) for name in new)
        names = ", ".join(prefix + name for name in new[:5])
        more = f" and {len(new) - 5} more" if len(new) > 5 else ""
        reasons = "; ".join(sorted({found[name] for name in new}))
        head = f"{title} for " if title else ""
        log.warning("tensortap: %s%s%s: %s", head, names, more, reasons)
        rank, world_size = ranks.rank_and_world_size()
        for name in new:
            full = prefix + name
            message = f"{title}: {found[name]}" if title else found[name]
            alert = Alert(rule, full, Kind.ACTIVATION, step, rank, full, message)
            self._record(alert, world_size)

    def _record(self, alert: Alert, world_size: int) -> None:
        (self.hints if alert.severity == HINT else self.alerts).append(alert)
        if self.budget is not None and alert.severity != HINT:
            for module in {alert.module, alert.origin or alert.module}:
                self.budget.lift(module.removeprefix(self.prefix), alert.step)
        self._hand_over()
        seq, now = pipeline.next_seq(), time.time_ns()
        record = record_of(alert, seq=seq, time_ns=now, world_size=world_size)
        self._records.send(record, 0)
