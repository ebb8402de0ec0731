"""Rules over the parameters of a model: which are trained, by what, and which are left out."""

from __future__ import annotations

from typing import Any

from tensortap.alerts.alert import HINT
from tensortap.alerts.rules import Rule
from tensortap.alerts.steps import MODEL, Found, in_a_row, latest, listed, of_steps
from tensortap.arguments import check_count, checked
from tensortap.frameworks.steps import StepFacts


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
def changed_outside(patience: int = 3) -> Rule:
    """Give a hint if something other than the optimizer's step changes what it trains."""
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        moved = [each.name for each in facts.parameters if each.moved and each.in_optimizer]
        in_a_row(state, "moved", bool(moved))
        if facts.rewritten is not None:  # through parameter.data, whose changes are not counted
            in_a_row(state, "rewritten", bool(facts.rewritten))
            state["names"] = facts.rewritten
        if max(state["moved"], state.get("rewritten", 0)) >= patience:
            message = (
                f"{listed(moved or state['names'])} change outside of the steps of the optimizers "
                "that are tracked; clipping or averaging of weights does that on purpose, a "
                "forgotten copy_() or an optimizer that is created again and again does not"
            )
            yield MODEL, message

    return of_steps(check, "changed_outside", HINT)


@checked
def never_runs(patience: int = 20) -> Rule:
    """Give a hint about a module that is not trained and has not run in `patience` steps.

    If it is trained, `no_gradient` reports it.
    """
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        if in_a_row(state, "steps", True) < patience:
            return
        for each in facts.parameters:
            if each.called or each.gradient or (each.trainable and each.in_optimizer):
                continue
            if module := each.name.rpartition(".")[0]:
                message = (
                    f"it has not run in {patience} steps; call it in forward(), remove it, or "
                    "ignore this if its weights are used without calling it"
                )
                yield module, message

    return of_steps(check, "never_runs", HINT)


def not_registered() -> Rule:
    """Report layers in a plain list or dict of a module, and tensors that are not parameters."""

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        for name, count in latest(state, facts.unregistered):
            message = (
                f"it holds {count} tensors that get gradients and that torch does not know as "
                "parameters: they are not trained, moved or saved; use nn.ModuleList, "
                "nn.ModuleDict, nn.ParameterList or nn.Parameter"
            )
            yield name, message

    return of_steps(check, "not_registered")


def repeated_layer() -> Rule:
    """Give a hint if one layer appears several times in a list of layers."""

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        for name, count in state.setdefault("found", facts.repeated_layers):
            message = (
                f"the same layer stands in it {count} times, as after [layer] * {count}, with one "
                "set of weights; create each layer anew, unless weights are to be shared"
            )
            yield name, message

    return of_steps(check, "repeated_layer", HINT)


def untied() -> Rule:
    """Report parameters that were the same one when tracking began, and are not any more."""

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        for first, other in latest(state, facts.untied):
            message = f"it was tied to {first}, and is a parameter of its own now; tie it again"
            yield other, message

    return of_steps(check, "untied")


def weight_decay() -> Rule:
    """Give a hint if weight decay acts on norms and biases."""

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        names = state.setdefault("names", facts.decayed_vectors)
        if names:
            message = (
                f"weight decay pulls norms and biases towards 0 ({listed(names)}); usually they "
                "are in a group of their own with weight_decay=0"
            )
            yield MODEL, message

    return of_steps(check, "weight_decay", HINT)


MODEL_RULES: tuple[Rule, ...] = (
    changed_outside(), never_changes(), never_runs(), not_registered(), repeated_layer(), untied(),
    weight_decay(),
)  # fmt: skip
