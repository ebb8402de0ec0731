"""The watcher: shows every record to the rules, and says each alert once."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from tensortap.alerts.alert import Alert, Finding, may_be_mask, module_of
from tensortap.alerts.rules import DEFAULT, Rule
from tensortap.errors import StopTraining
from tensortap.record import Kind, Record

log = logging.getLogger("tensortap")

_SERIES = 20_000  # tensors that are remembered
_KEPT = 1000  # alerts that are remembered
_NONE: list[Alert] = []

Action = str | Callable[[Alert], object]


class Moment:
    """What one rank has shown of the step that is under way, for rules that look around.

    `first` says, for ``"NaN"`` and ``"Inf"``, under which name and kind it came first. An output
    whose infinities are all -Inf may be a mask: `masks` counts those, `mask` is the first of them
    since the last output that was finite, which what comes next may follow from.
    """

    __slots__ = (
        "_gradients", "bad_weights", "first", "followed", "mask", "masks", "outputs", "step",
        "weights_seen",
    )  # fmt: skip

    def __init__(self) -> None:
        self.step: int | None = None
        self.first: dict[str, tuple[str, Kind]] = {}
        self.outputs = 0  # finite ones
        self.mask = ""
        self.masks = 0
        self.followed = 0  # what was not finite because something before it was not
        self.weights_seen = False
        self.bad_weights: dict[str, int] = {}  # name → since which step
        self._gradients: collections.deque[str] = collections.deque(maxlen=32)

    def begin(self, step: int) -> None:
        """Another step: what was seen of the last one counts no more, but for the weights."""
        self.step = step
        self.first.clear()
        self.outputs = self.masks = 0
        self.mask = ""
        self._gradients.clear()

    def gradient_before(self, name: str) -> str:
        """Whose gradient came last before that of a module; not that of a module around it."""
        for before in reversed(self._gradients):
            if before != name and before and not name.startswith(f"{before}."):
                return before
        return ""

    def passed(self, record: Record, finite: bool) -> None:
        """A record has been seen by all rules."""
        kind = record.kind
        if kind is Kind.ACTIVATION:
            self.outputs += finite
            if finite:
                self.mask = ""  # whatever was masked has been taken for what it is
            elif may_be_mask(record):
                self.masks += 1
                self.mask = self.mask or record.name
        elif kind is Kind.GRADIENT:
            if finite:
                self._gradients.append(record.name)
        elif kind is Kind.WEIGHT:
            self.weights_seen = True
            if not finite:
                if len(self.bad_weights) < _SERIES:
                    self.bad_weights.setdefault(record.name, record.step)
            elif self.bad_weights:
                self.bad_weights.pop(record.name, None)


class Memory:
    """What one rule remembers of one tensor: a handful of numbers, and `notes` for others."""

    __slots__ = ("moment", "notes", "seen", "seen_finite", "spread", "streak", "typical")

    def __init__(self, moment: Moment) -> None:
        self.moment = moment
        self.seen = 0  # how often `follow` was called
        self.typical = 0.0
        self.spread = 0.0
        self.streak = 0
        self.seen_finite = False
        self.notes: dict[str, Any] = {}

    def follow(self, value: float, rate: float) -> None:
        """Let `typical`, and the `spread` around it, follow a value slowly; at first, quickly."""
        self.seen += 1
        rate = max(rate, 1.0 / self.seen)
        off = value - self.typical
        self.typical += rate * off
        if self.seen > 1:
            self.spread += rate * (abs(off) - self.spread)

    def in_a_row(self, holds: bool) -> int:
        """How often it has held in a row, now included."""
        self.streak = self.streak + 1 if holds else 0
        return self.streak


class _Watch:
    """A rule on a tensor."""

    __slots__ = ("again", "fired", "memory", "rule")

    def __init__(self, rule: Rule, moment: Moment) -> None:
        self.rule = rule
        self.memory = Memory(moment)
        self.fired: int | None = None  # the last step at which it held
        self.again = 0


class _Series:
    """A tensor over the steps."""

    __slots__ = ("before", "finite", "moment", "step", "watches")

    def __init__(self, rules: Iterable[Rule], moment: Moment) -> None:
        self.moment = moment
        self.watches = [_Watch(rule, moment) for rule in rules]
        self.step: int | None = None
        self.before: int | None = None  # the step at which it was seen before this one
        self.finite = False  # whether it ever was


class Watcher:
    """Shows records to rules; an alert is given once, and again only after it had passed.

    `on_alert` is what to do: a function of the alert, ``"stop"`` (then `check` raises),
    ``"keep"`` (then `keep` says which steps' tensors are wanted whole), or a list of those.

    >>> watcher = Watcher()
    >>> loss = Record("loss", Kind.METRIC, 3, 0, 0, 0, 1, 0, value=float("nan"))
    >>> [alert.rule for alert in watcher.see(loss)], watcher.see(loss)
    (['nan'], [])
    """

    def __init__(
        self,
        rules: Iterable[Rule] | bool = True,
        *,
        on_alert: Action | Iterable[Action] | None = None,
        on_fault: Callable[[str, Exception], object] | None = None,
    ) -> None:
        self.rules = DEFAULT if rules is True else tuple(rules or ())
        for rule in self.rules:
            if not callable(rule):
                raise TypeError(f"a rule is a function of a record and a memory, not {rule!r}")
        self._actions = _actions(on_alert)
        self._on_fault = on_fault or self._log_once
        self.alerts: collections.deque[Alert] = collections.deque(maxlen=_KEPT)
        self.counts: collections.Counter[str] = collections.Counter()  # of alerts, by rule
        self.again: collections.Counter[str] = collections.Counter()  # that were not said again
        self.faults = 0
        self._logged: set[str] = set()
        self._series: dict[tuple[str, Kind, int, str | None], _Series] = {}
        self._moments: dict[int, Moment] = {}
        self._keep: dict[int, int] = {}
        self._stop: Alert | None = None
        self._lock = threading.RLock()  # backward may run in threads of its own

    @property
    def followed(self) -> int:
        """How many tensors were not finite because one before them was not: not alerted."""
        return sum(moment.followed for moment in self._moments.values())

    def see(self, record: Record) -> list[Alert]:
        """Show a record to the rules, in the order of capture; the alerts that it gives."""
        kind = record.kind
        tags = record.tags
        if kind is Kind.ALERT or "recompute" in tags:
            return _NONE
        found = _NONE
        with self._lock:
            key = (record.name, kind, record.rank, tags.get("state"))
            series = self._series.get(key)
            if series is None:
                series = self._begin(key)
            moment, step = series.moment, record.step
            if moment.step != step:
                moment.begin(step)
            if series.step != step:
                series.before, series.step = series.step, step
            for watch in series.watches:
                try:
                    said = watch.rule(record, watch.memory)
                except Exception as error:
                    self._fault(_name(watch.rule), error)
                    continue
                if said is not None:
                    alert = self._alert(said, watch, series, record)
                    if alert is not None:
                        found = [*found, alert]
            stats = record.stats
            if stats is not None:
                finite = not (stats.nans or stats.posinfs or stats.neginfs)
                moment.passed(record, finite)
                if finite and not series.finite:
                    series.finite = True
                    for watch in series.watches:
                        watch.memory.seen_finite = True
        for alert in found:
            self._act(alert)
        return found

    def check(self, skipped: Callable[[], bool] = lambda: False) -> None:
        """Raise `StopTraining` if an alert came and alerts stop training; only once.

        `skipped` says whether the optimizer has left this step out, as a GradScaler makes it do
        when a gradient is not finite: that is its way to find its scale, and no harm is done.
        """
        alert, self._stop = self._stop, None
        if alert is not None and not (_overflow(alert) and skipped()):
            raise StopTraining(str(alert), alert)

    def keep(self, step: int, rank: int = 0) -> bool:
        """Whether whole tensors of a step are wanted: the rest of an alert's, and the next."""
        since = self._keep.get(rank)
        return since is not None and since <= step <= since + 1

    def _begin(self, key: tuple[str, Kind, int, str | None]) -> _Series:
        _, kind, rank, _ = key
        moment = self._moments.setdefault(rank, Moment())
        if len(self._series) >= _SERIES:
            for old in list(self._series)[: _SERIES // 4]:
                del self._series[old]
        rules = [r for r in self.rules if kind in getattr(r, "kinds", (kind,))]
        series = self._series[key] = _Series(rules, moment)
        return series

    def _alert(
        self, said: Finding | str, watch: _Watch, series: _Series, record: Record
    ) -> Alert | None:
        name = _name(watch.rule)
        # it has passed when there was a step, since, at which it did not hold
        known = watch.fired is not None and watch.fired in (series.step, series.before)
        watch.fired = series.step
        if known:
            watch.again += 1
            self.again[name] += 1
            return None
        finding = said if isinstance(said, Finding) else Finding(str(said))
        module = module_of(record)
        alert = Alert(
            rule=name,
            name=record.name,
            kind=record.kind,
            step=record.step,
            rank=record.rank,
            module=module,
            message=finding.message,
            origin=finding.origin or module,
            call=record.call,
            again=watch.again,
            facts=dict(finding.facts),
        )
        watch.again = 0
        self.counts[name] += 1
        self.alerts.append(alert)
        return alert

    def _act(self, alert: Alert) -> None:
        for action in self._actions:
            if action == "stop":
                if self._stop is None or (_overflow(self._stop) and not _overflow(alert)):
                    self._stop = alert
            elif action == "keep":
                self._keep[alert.rank] = alert.step
            elif callable(action):
                try:
                    action(alert)
                except Exception as error:
                    self._fault("on_alert", error)

    def _fault(self, name: str, error: Exception) -> None:
        self.faults += 1
        self._on_fault(name, error)

    def _log_once(self, name: str, error: Exception) -> None:
        if name not in self._logged:
            self._logged.add(name)
            log.warning("tensortap: the rule %r failed: %r", name, error)


def _overflow(alert: Alert) -> bool:
    """Whether it is a gradient that is not finite: of no consequence if nobody uses it."""
    gradient = alert.kind is Kind.GRADIENT or alert.kind is Kind.WEIGHT_GRADIENT
    return gradient and alert.rule in ("nan", "inf")


def _name(rule: Rule) -> str:
    return str(getattr(rule, "__name__", type(rule).__name__))


def _actions(on_alert: Action | Iterable[Action] | None) -> tuple[Action, ...]:
    if on_alert is None:
        return ()
    several = (on_alert,) if isinstance(on_alert, str) or callable(on_alert) else tuple(on_alert)
    for action in several:
        if not callable(action) and action not in ("stop", "keep"):
            raise ValueError(f"on_alert is 'stop', 'keep' or a function, not {action!r}")
    return several
