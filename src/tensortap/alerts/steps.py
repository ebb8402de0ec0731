"""Rules over what a training step does: bugs that raise no error.

A rule of steps is a function ``rule(facts, state)`` of `StepFacts` and of a dict that it keeps
between steps. It yields pairs of a name and a message. Each factory takes its thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tensortap.alerts.alert import ALERT, Alert
from tensortap.alerts.rules import Rule
from tensortap.arguments import check_count, check_positive, checked
from tensortap.frameworks.steps import InitialWeight, StepFacts
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind, Summary

Found = Iterator[tuple[str, str]]
StepRule = Callable[[StepFacts, dict[str, Any]], Found]

MODEL = "model"  # what alerts are called that concern no single parameter
_FEW = 16  # values of a weight whose standard deviation says little
_TINY, _HUGE = 1e-30, 1e15  # sizes that no weight has on purpose


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


def latest(state: dict[str, Any], facts: Any, default: Any = ()) -> Any:
    """Return facts that only some steps have, from the latest step that has them."""
    if facts is not None:
        state["latest"] = facts
    return state.get("latest", default)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def of_model(
    name: str,
    patience: int,
    holds: Callable[[StepFacts], bool],
    message: str,
    severity: str = ALERT,
) -> Rule:
    """Return a rule that reports a condition of the whole model, `patience` steps in a row."""
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        if in_a_row(state, MODEL, holds(facts)) >= patience:
            yield MODEL, message

    return of_steps(check, name, severity)


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
def learning_rate(patience: int = 3, jump: float = 10.0) -> Rule:
    """Report a learning rate that is 0, negative, or `jump` times larger than ever before."""
    check_count("patience", patience)
    check_positive("jump", jump)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        if not facts.optimizer_steps:
            return
        for group in facts.groups:
            name = f"learning rate of group {group.number}"
            if in_a_row(state, f"zero {name}", group.rate == 0.0) >= patience:
                yield name, f"it has been 0 for {patience} steps, so nothing is learned"
            if group.rate < 0.0:
                yield name, f"it is negative ({group.rate:.3g}), so the loss is made larger"
            largest, seen = state.get(name, (0.0, 0))
            if seen >= patience and group.rate > jump * largest > 0.0:
                message = (
                    f"it jumps from at most {largest:.3g} to {group.rate:.3g}; is the scheduler "
                    "stepped in the right place?"
                )
                yield name, message
            state[name] = max(largest, group.rate), seen + 1

    return of_steps(check, "learning_rate")


@checked
def training_in_eval(patience: int = 3) -> Rule:
    """Report a model with dropout or batch norm that is trained in ``eval()`` mode."""
    return of_model(
        "training_in_eval",
        patience,
        lambda facts: facts.trained_in_eval,
        "it is trained in eval() mode: dropout is off and batch norm does not learn; call "
        "model.train() before training, and again after each evaluation",
    )


def dropout_in_evaluation() -> Rule:
    """Report dropout that is active while gradients are off, as in an evaluation."""

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        for name in facts.dropout:
            message = (
                "dropout is active although gradients are off, so an evaluation is noisy; call "
                "model.eval() before it"
            )
            yield name, message

    return of_steps(check, "dropout_in_evaluation")


def _is_sized_wrong(weight: InitialWeight, factor: float) -> bool:
    """Return whether the standard deviation is far from usual; of few values it may well be."""
    if not weight.inputs or weight.summary.count < _FEW:
        return False
    return not 1 / factor <= weight.summary.std * weight.inputs**0.5 <= factor


def _is_absurd(summary: Summary) -> bool:
    return summary.max_abs > _HUGE or 0.0 < summary.max_abs < _TINY


@checked
def initialization(factor: float = 100.0) -> Rule:
    """Report weights that start all equal, like another weight, or with a wrong size.

    A weight is expected to have a standard deviation of about ``1/sqrt(fan_in)``; `factor` is how
    far off it may be. Weights that are all 0 are common on purpose. So is one value in all of a
    bias or norm, of which only values that nobody can have meant are reported.
    """
    check_positive("factor", factor)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        first: dict[bytes, str] = {}
        for weight in facts.initial:
            summary = weight.summary
            if summary.finite != summary.count:
                yield weight.name, "it starts with values that are not finite: is it initialized?"
            elif weight.trainable and _is_absurd(summary):
                message = (
                    f"its values start with a size of up to {summary.max_abs:.3g}: is it "
                    "initialized? torch.empty() returns whatever is in memory"
                )
                yield weight.name, message
            elif weight.dimensions < 2:
                continue
            elif summary.std == 0.0 and summary.count > 1:
                if summary.max_abs:
                    yield weight.name, f"all of its values start as {summary.max:.6g}"
            elif _is_sized_wrong(weight, factor):
                usual = weight.inputs**-0.5
                message = (
                    f"it starts with a standard deviation of {summary.std:.3g}, where "
                    f"{usual:.3g} is usual for {weight.inputs:,} inputs"
                )
                yield weight.name, message
            elif weight.digest and (other := first.setdefault(weight.digest, weight.name)):
                if other != weight.name:
                    yield weight.name, f"it starts with the same random values as {other}"

    return of_steps(check, "initialization")


OPTIMIZER_RULES: tuple[Rule, ...] = (
    dropout_in_evaluation(), frozen_changes(), gradient_discarded(), gradient_not_zeroed(),
    initialization(), learning_rate(), no_gradient(), no_optimizer(), step_repeated(),
    training_in_eval(),
)  # fmt: skip
