"""The alert monitor: shows every record to the rules and reports each problem once."""

from __future__ import annotations

import collections
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from tensortap.alerts.alert import Alert, Finding, may_be_mask, module_of
from tensortap.alerts.rules import Rule, default_rules
from tensortap.capture.pipeline import pipeline
from tensortap.core.errors import StopTraining
from tensortap.core.record import Kind, Record
from tensortap.runs.reader import similar_names

_MAX_TENSORS = 20_000  # tensors whose state is kept
_MAX_ALERTS = 1000  # alerts that are kept

listeners: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects whose method `notify` gets every alert."""

Action = str | Callable[[Alert], object]


class StepState:
    """State of the current step on one rank, for rules that need context.

    `first` maps ``"NaN"`` and ``"Inf"`` to the name and kind of the tensor in which it appeared
    first. An output whose infinities are all -Inf may be a mask: `masks` counts these outputs,
    and `mask` is the first of them since the last finite output, which may explain what follows.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.first: dict[str, tuple[str, Kind]] = {}
        self.outputs = 0  # finite ones
        self.mask = ""
        self.masks = 0
        self.followed = 0  # non-finite tensors that an earlier non-finite tensor explains
        self.weights_seen = False
        self.largest = -math.inf  # log2 of the largest gradient
        self.largest_before = -math.inf  # in the last step
        self.modules: dict[str, float] = {}  # the same for the gradients of each one's weights
        self.modules_before: dict[str, float] = {}
        self.bad_weights: dict[str, int] = {}  # name → step since which it is not finite
        self._gradients: dict[str, None] = {}  # modules with finite ones, the last at the end

    def begin(self, step: int) -> None:
        """Start a new step; only what is known about weights carries over."""
        self.step = step
        self.first.clear()
        self.outputs = self.masks = 0
        self.mask = ""
        self.largest, self.largest_before = -math.inf, self.largest
        self.modules_before |= self.modules  # within a budget, each is seen in some steps only
        self.modules = {}
        self._gradients.clear()

    def gradient_before(self, name: str) -> str:
        """Return whose gradient came last before that of `name`, ignoring enclosing modules."""
        for before in reversed(self._gradients):
            if before != name and before and not name.startswith(f"{before}."):
                return before
        return ""

    def gradient_around(self, name: str) -> str:
        """Return the innermost module around `name` whose output had a finite gradient."""
        around = (before for before in self._gradients if name.startswith(f"{before}."))
        return max(around, key=len, default="")

    def update(self, record: Record, finite: bool) -> None:
        """Take note of a record after all rules have checked it."""
        kind = record.kind
        if kind is Kind.ACTIVATION:
            self.outputs += finite
            if finite:
                self.mask = ""  # the mask was consumed without harm
            elif may_be_mask(record):
                self.masks += 1
                self.mask = self.mask or record.name
        elif kind is Kind.GRADIENT:
            if finite:
                module = module_of(record)
                self._gradients.pop(module, None)
                self._gradients[module] = None
        elif kind is Kind.WEIGHT:
            self.weights_seen = True
            if finite:
                self.bad_weights.pop(record.name, None)
            elif len(self.bad_weights) < _MAX_TENSORS:
                self.bad_weights.setdefault(record.name, record.step)


class RuleState:
    """Memory of one rule about one tensor; `notes` is free for rules that users write."""

    __slots__ = (
        "_last_found", "_streak_step", "_unreported", "notes", "seen", "seen_finite", "spread",
        "step_state", "streak", "typical",
    )  # fmt: skip

    def __init__(self, step_state: StepState) -> None:
        self.step_state = step_state
        self.seen = 0  # calls of `follow`
        self.typical = 0.0
        self.spread = 0.0
        self.streak = 0
        self._streak_step: int | None = None
        self.seen_finite = False  # whether the tensor has ever been finite
        self.notes: dict[str, Any] = {}
        self._last_found: int | None = None  # the last step at which the rule found its problem
        self._unreported = 0  # findings since the last alert

    def follow(self, value: float, rate: float) -> None:
        """Move `typical` and `spread` towards a value: fast at first, later by `rate`.

        The spread takes twice as long: fewer differences than that tell it badly.
        """
        self.seen += 1
        first = 1.0 / self.seen
        difference = value - self.typical
        self.typical += max(rate, first) * difference
        if self.seen > 1:
            self.spread += max(rate / 2, first) * (abs(difference) - self.spread)

    def another(self, name: str) -> RuleState:
        """Return the state of another series of numbers about the same tensor."""
        found: RuleState = self.notes.setdefault(name, RuleState(self.step_state))
        return found

    def in_a_row(self, holds: bool) -> int:
        """Update `streak` and return for how many steps in a row a condition has held."""
        if not holds:
            self.streak = 0
        elif self._streak_step != self.step_state.step:  # a module may be called several times
            self.streak += 1
            self._streak_step = self.step_state.step
        return self.streak


class _TensorState:
    """The rules that apply to one tensor, and when it was seen."""

    __slots__ = ("previous_step", "rules", "step", "step_state")

    def __init__(self, rules: Iterable[Rule], step_state: StepState) -> None:
        self.step_state = step_state
        self.rules = [(rule, RuleState(step_state)) for rule in rules]
        self.step: int | None = None
        self.previous_step: int | None = None


class AlertMonitor:
    """Shows records to rules and raises an alert when a problem appears, not while it lasts.

    `on_alert` says what to do: a function that gets the alert, ``"stop"`` (`check` raises),
    ``"keep"`` (`keep` says for which steps whole tensors are wanted), or a list of these.

    >>> monitor = AlertMonitor()
    >>> loss = Record("loss", Kind.METRIC, 3, 0, 0, 0, 1, 0, value=float("nan"))
    >>> [alert.rule for alert in monitor.see(loss)], monitor.see(loss)
    (['nan'], [])
    """

    def __init__(
        self,
        rules: Iterable[Rule] | bool = True,
        *,
        on_alert: Action | Iterable[Action] | None = None,
    ) -> None:
        given = default_rules() if rules is True else _each("alerts", rules or ())
        self.rules: tuple[Rule, ...] = tuple(map(_rule, given))
        self._actions = _actions(on_alert)
        self.alerts: collections.deque[Alert] = collections.deque(maxlen=_MAX_ALERTS)
        self._tensors: dict[tuple[str, Kind, int, str | None], _TensorState] = {}
        self._step_states: dict[int, StepState] = {}  # by rank
        self._keep_from: dict[int, int] = {}  # rank → step
        self.suspected: set[tuple[Kind, str]] = set()  # what a rule wants to see again soon
        self._stop: Alert | None = None
        self._lock = threading.RLock()  # the backward pass may run in its own threads

    @property
    def followed(self) -> int:
        """The number of non-finite tensors that an earlier one explains, and so have no alert."""
        return sum(state.followed for state in self._step_states.values())

    def see(self, record: Record) -> list[Alert]:
        """Show a record to the rules, in the order of capture, and return the new alerts."""
        kind, tags = record.kind, record.tags
        alerts: list[Alert] = []
        if kind is Kind.ALERT or "recompute" in tags:
            return alerts
        with self._lock:
            key = (record.name, kind, record.rank, tags.get("state"))
            tensor = self._tensors.get(key) or self._add_tensor(key)
            step_state, step = tensor.step_state, record.step
            if step_state.step != step:
                step_state.begin(step)
            if tensor.step != step:
                tensor.previous_step, tensor.step = tensor.step, step
            for rule, state in tensor.rules:
                try:
                    finding = rule(record, state)
                except Exception as error:
                    pipeline.fault(_name(rule), error, "raised an error as an alert rule")
                    continue
                if state.streak and finding is None:
                    self.suspected.add((kind, record.name))
                if finding is not None:
                    alert = self._alert(rule, state, finding, tensor, record)
                    if alert is not None:
                        alerts.append(alert)
            stats = record.stats
            if stats is not None:
                finite = not (stats.nans or stats.posinfs or stats.neginfs)
                step_state.update(record, finite)
                if finite:
                    for _, state in tensor.rules:
                        state.seen_finite = True
        for alert in alerts:
            self._act(alert)
        return alerts

    def add(self, alert: Alert) -> None:
        """Take an alert that no rule has raised, and act on it."""
        with self._lock:
            self.alerts.append(alert)
        self._act(alert)

    def check(self, skipped: Callable[[], bool] = lambda: False) -> None:
        """Raise `StopTraining`, once, if there was an alert and ``on_alert="stop"``.

        `skipped` says whether the optimizer has skipped this step. A GradScaler makes it skip a
        step with non-finite gradients while it looks for its scale; that is no reason to stop.
        """
        alert, self._stop = self._stop, None
        if alert is not None and not (_is_gradient_overflow(alert) and skipped()):
            raise StopTraining(str(alert), alert)

    def keep(self, step: int, rank: int = 0) -> bool:
        """Return whether whole tensors are wanted: in the step of an alert and in the next."""
        since = self._keep_from.get(rank)
        return since is not None and since <= step <= since + 1

    def _add_tensor(self, key: tuple[str, Kind, int, str | None]) -> _TensorState:
        _, kind, rank, _ = key
        step_state = self._step_states.setdefault(rank, StepState())
        if len(self._tensors) >= _MAX_TENSORS:
            for oldest in list(self._tensors)[: _MAX_TENSORS // 4]:
                del self._tensors[oldest]
        rules = [rule for rule in self.rules if kind in getattr(rule, "kinds", (kind,))]
        tensor = self._tensors[key] = _TensorState(rules, step_state)
        return tensor

    def _alert(
        self,
        rule: Rule,
        state: RuleState,
        finding: Finding | str,
        tensor: _TensorState,
        record: Record,
    ) -> Alert | None:
        """Return an alert, unless the problem has been there since the last one."""
        name = _name(rule)
        last = state._last_found
        state._last_found = tensor.step
        if last is not None and last in (tensor.step, tensor.previous_step):
            state._unreported += 1
            return None
        if not isinstance(finding, Finding):
            finding = Finding(str(finding))
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
            again=state._unreported,
            facts=dict(finding.facts),
        )
        state._unreported = 0
        self.alerts.append(alert)
        return alert

    def _act(self, alert: Alert) -> None:
        for listener in list(listeners):
            listener.notify(alert)
        for action in self._actions:
            if action == "stop":
                # a gradient overflow may be harmless: another alert takes its place
                if self._stop is None or (
                    _is_gradient_overflow(self._stop) and not _is_gradient_overflow(alert)
                ):
                    self._stop = alert
            elif action == "keep":
                self._keep_from[alert.rank] = alert.step
            elif callable(action):
                try:
                    action(alert)
                except Exception as error:
                    pipeline.fault("on_alert", error, "raised an error")


def _is_gradient_overflow(alert: Alert) -> bool:
    gradient = alert.kind is Kind.GRADIENT or alert.kind is Kind.WEIGHT_GRADIENT
    return gradient and alert.rule in ("nan", "inf")


def _name(rule: Rule) -> str:
    return str(getattr(rule, "__name__", type(rule).__name__))


def _rule(given: Any) -> Rule:
    """Return a rule, or the built-in one of that name."""
    if isinstance(given, str):
        known = {rule.__name__: rule for rule in default_rules()}
        if given not in known:
            raise ValueError(
                f"alerts: no rule is called {given!r}; {similar_names(given, list(known))}"
            )
        return known[given]
    if not callable(given):
        raise TypeError(
            f"alerts: a rule must be a name, or a function of a record and a state, got {given!r}"
        )
    rule: Rule = given
    return rule


def _each(argument: str, given: Any) -> tuple[Any, ...]:
    """Return what was given as one function, one word or a list of them."""
    if isinstance(given, str) or callable(given):
        return (given,)
    if not isinstance(given, Iterable):
        raise TypeError(f"{argument} must be a function or a list of them, got {given!r:.80}")
    return tuple(given)


def _actions(on_alert: Action | Iterable[Action] | None) -> tuple[Action, ...]:
    if on_alert is None:
        return ()
    actions = _each("on_alert", on_alert)
    for action in actions:
        if not callable(action) and action not in ("stop", "keep"):
            raise ValueError(f"on_alert must be 'stop', 'keep' or a function, got {action!r}")
    return actions
