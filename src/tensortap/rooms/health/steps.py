"""Rules over what a training step does: bugs that raise no error.

A rule of steps is a function ``rule(facts, state)`` of `StepFacts` and of a dict that it keeps
between steps. It yields pairs of a name and a message. Each factory takes its thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tensortap.alerts.alert import ALERT, HINT, Alert
from tensortap.alerts.rules import Rule
from tensortap.capture.pipeline import pipeline
from tensortap.core.arguments import check_count, check_positive, checked
from tensortap.core.record import Kind
from tensortap.rooms.health.step_facts import StepFacts

Found = Iterator[tuple[str, str]]
StepRule = Callable[[StepFacts, dict[str, Any]], Found]
Fact = TypeVar("Fact")

MODEL = "model"  # what alerts are called that concern no single parameter
_EARLY = 300  # steps in which no schedule by epochs makes many drops
_SMALL_DROP, _LARGE_DROP = 20, 3  # how many equal drops of a rate are many; large: by half or more
_FALL = 50.0  # how far they lead


def of_steps(check: StepRule, name: str, severity: str = ALERT) -> Rule:
    """Return a rule that sees no records, and `check` once per step."""

    def rule(record: Any, state: Any) -> None:
        return None

    rule.__name__ = name
    rule.__dict__.update(kinds=frozenset(), of_steps=check, severity=severity)
    return rule


class StepMonitor:
    """Shows steps to rules, and raises an alert when a problem appears, not while it lasts."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules: list[tuple[str, StepRule, str, dict[str, Any]]] = [
            (rule.__name__, rule.__dict__["of_steps"], rule.__dict__["severity"], {})
            for rule in rules
            if hasattr(rule, "of_steps")
        ]
        self._lasting: dict[str, set[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._rules)

    def check(self, facts: StepFacts, rank: int) -> list[Alert]:
        """Show a step to the rules and return the new alerts."""
        alerts = []
        for title, rule, severity, state in self._rules:
            try:
                found = dict(rule(facts, state))
            except Exception as error:
                pipeline.fault(title, error, "raised an error as an alert rule")
                continue
            lasting = self._lasting.pop(title, ())
            for name, message in found.items():
                if name not in lasting:
                    module = name.rpartition(".")[0]
                    alerts.append(
                        Alert(
                            title, name, Kind.WEIGHT, facts.step, rank, module, message, module,
                            severity=severity,
                        )
                    )  # fmt: skip
            if found:
                self._lasting[title] = set(found)
        return alerts


def in_a_row(state: dict[str, Any], name: str, holds: bool) -> int:
    """Return for how many steps in a row a condition has held."""
    state[name] = state.get(name, 0) + 1 if holds else 0
    count: int = state[name]
    return count


def names_in_a_row(state: dict[str, Any], names: Iterable[str], patience: int) -> list[str]:
    """Return the names that have been given for `patience` steps in a row.

    >>> state = {}
    >>> [names_in_a_row(state, names, 2) for names in ("ab", "b", "bc")]
    [[], ['b'], ['b']]
    """
    before = state.get("names", {})
    now = state["names"] = {name: before.get(name, 0) + 1 for name in names}
    return [name for name, count in now.items() if count >= patience]


def of_facts(
    name: str,
    patience: int,
    chosen: Callable[[StepFacts], Iterable[Fact]],
    problem: Callable[[Fact], str],
    severity: str = ALERT,
) -> Rule:
    """Return a rule about the model that reports a problem of `patience` facts in a row.

    `chosen` returns the facts of a step that concern it, `problem` a message, empty if all is well.
    """
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        for each in chosen(facts):
            message = problem(each)
            in_a_row(state, MODEL, bool(message))
            state["message"] = message or state.get("message")
        if state.get(MODEL, 0) >= patience:
            yield MODEL, state["message"]

    return of_steps(check, name, severity)


def of_model(
    name: str,
    patience: int,
    holds: Callable[[StepFacts], bool],
    message: str,
    severity: str = ALERT,
) -> Rule:
    """Return a rule that reports a condition of the whole model, `patience` steps in a row."""
    return of_facts(
        name,
        patience,
        lambda facts: (facts,),
        lambda facts: message if holds(facts) else "",
        severity,
    )


@checked
def no_optimizer(patience: int = 3) -> Rule:
    """Report a parameter that gets gradients, is in no optimizer, and never changes."""
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        if not facts.optimizer_steps:
            return
        left_out = [
            each.name
            for each in facts.parameters
            if not each.in_optimizer and each.trainable and each.gradient and not each.changed
        ]
        for name in names_in_a_row(state, left_out, patience):
            message = "it gets gradients, but is in no optimizer, and has not changed"
            if facts.strays:
                message += (
                    f"; the optimizer has {facts.strays} tensors that the model does not have: "
                    "create it after parameters are replaced, moved or re-initialized"
                )
            yield name, message

    return of_steps(check, "no_optimizer")


@checked
def no_gradient(patience: int = 20) -> Rule:
    """Report a parameter that has never had a gradient in `patience` steps of its optimizer."""
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        if not facts.optimizer_steps or facts.discarded:
            return
        idle = not any(each.gradient or each.changed for each in facts.parameters)
        if in_a_row(state, MODEL, idle) >= patience:
            message = (
                f"no parameter has had a gradient in {patience} steps: is the loss computed from "
                "the model's output? item(), detach(), numpy() and torch.tensor(loss) cut it off"
            )
            yield MODEL, message
        if not any(each.gradient for each in facts.parameters):
            return
        had = state.setdefault("had", set())
        had.update(each.name for each in facts.parameters if each.gradient)
        for each in facts.parameters:
            if each.gradient or each.name in had or not (each.trainable and each.in_optimizer):
                continue
            if in_a_row(state, f"steps {each.name}", True) < patience:
                continue
            why = "its module runs: is its output detached, or unused?"
            if not each.called:
                why = "its module has never run: is it called in forward()?"
            yield each.name, f"it has had no gradient in {patience} steps; {why}"

    return of_steps(check, "no_gradient")


def frozen_changes() -> Rule:
    """Report a frozen parameter that the step of an optimizer changes."""

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        for each in facts.parameters:
            if each.optimized_now and not each.trainable:
                message = (
                    "it is frozen (requires_grad=False), but the optimizer changes it by momentum, "
                    "weight decay or an old gradient; take it out of the optimizer"
                )
                yield each.name, message

    return of_steps(check, "frozen_changes")


def gradient_discarded() -> Rule:
    """Report gradients that are zeroed between the backward pass and the optimizer's step."""
    return of_model(
        "gradient_discarded",
        1,
        lambda facts: facts.discarded,
        "gradients are zeroed after the backward pass and before the optimizer's step, "
        "which changes nothing; call zero_grad() before backward(), or after step()",
    )


@checked
def gradient_not_zeroed(patience: int = 2) -> Rule:
    """Report gradients that are added to those of an earlier step of the optimizer."""
    return of_model(
        "gradient_not_zeroed",
        patience,
        lambda facts: facts.carried,
        "gradients are added to those that the optimizer has already used; call "
        "zero_grad() after each step",
    )


@checked
def step_repeated(patience: int = 2) -> Rule:
    """Report an optimizer that uses the same gradients twice."""
    return of_model(
        "step_repeated",
        patience,
        lambda facts: facts.repeated,
        "the optimizer's step() is called twice with the same gradients; remove a call, or "
        "compute new gradients in between",
    )


@checked
def clipping(patience: int = 10) -> Rule:
    """Give a hint if gradients are changed after the optimizer has used them, and then zeroed."""
    return of_model(
        "clipping",
        patience,
        lambda facts: facts.changed_late,
        "gradients are changed after the optimizer has used them, and then zeroed: clip them "
        "between backward() and step()",
        HINT,
    )


@checked
def never_changes(patience: int = 3) -> Rule:
    """Report a parameter whose values no step changes, although its gradient is not 0.

    Every tenth step is looked at, and later every hundredth.
    """
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        for each in facts.parameters:
            if each.stuck:
                in_a_row(state, each.name, True)
            elif each.stuck is not None:
                state.pop(each.name, None)
            if state and state.get(each.name, 0) >= patience:
                message = (
                    "the optimizer does not change its values, although its gradient is not 0; in "
                    "16 bits, small updates are lost in rounding: keep the weights in float32, or "
                    "use a larger learning rate"
                )
                yield each.name, message

    return of_steps(check, "never_changes")


@checked
def learning_rate(patience: int = 3, jump: float = 10.0) -> Rule:
    """Report a learning rate that is 0, negative, or `jump` times larger than ever before."""
    check_count("patience", patience)
    check_positive("jump", jump)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        if not facts.optimizer_steps:
            return
        for number, rate in enumerate(facts.rates):
            name = f"learning rate of group {number}"
            if in_a_row(state, f"zero {name}", rate == 0.0) >= patience:
                yield name, f"it has been 0 for {patience} steps, so nothing is learned"
            if rate < 0.0:
                yield name, f"it is negative ({rate:.3g}), so the loss is made larger"
            largest, seen = state.get(name, (0.0, 0))
            if seen >= patience and rate > jump * largest > 0.0:
                message = (
                    f"it jumps from at most {largest:.3g} to {rate:.3g}; is the scheduler "
                    "stepped in the right place?"
                )
                yield name, message
            state[name] = max(largest, rate), seen + 1

    return of_steps(check, "learning_rate")


def scheduler_per_batch() -> Rule:
    """Give a hint if a learning rate falls 50-fold by equal factors within the first 300 steps."""

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        if not facts.optimizer_steps:
            return
        steps = in_a_row(state, "steps", True)
        for number, rate in enumerate(facts.rates):
            name = f"learning rate of group {number}"
            last, first, factor, drops = state.get(name, (rate, rate, 0.0, 0))
            if 0.0 < rate < 0.999 * last and steps <= _EARLY:
                ratio = rate / last
                same = abs(ratio - factor) < 1e-6 * ratio
                first, drops = (first, drops + 1) if same else (last, 1)
                factor = ratio
            state[name] = rate, first, factor, drops
            many = _LARGE_DROP if factor <= 0.5 else _SMALL_DROP
            if drops >= many and first >= _FALL * rate:
                message = (
                    f"it fell from {first:.3g} to {rate:.3g} in {drops} equal drops within "
                    f"{steps} steps: is the scheduler stepped per batch instead of per epoch?"
                )
                yield name, message

    return of_steps(check, "scheduler_per_batch", HINT)


OPTIMIZER_RULES: tuple[Rule, ...] = (
    clipping(), frozen_changes(), gradient_discarded(), gradient_not_zeroed(), learning_rate(),
    never_changes(), no_gradient(), no_optimizer(), scheduler_per_batch(), step_repeated(),
)  # fmt: skip
