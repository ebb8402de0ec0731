"""Rules over training steps: bugs that raise no error. ``alerts=True`` uses all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensortap.alerts.alert import HINT
from tensortap.core.record import Summary
from tensortap.rooms.health.steps import (
    MODEL,
    Found,
    InitialWeight,
    PassFacts,
    State,
    StepFacts,
    in_a_row,
    names_in_a_row,
    rule_of_steps,
)

# -- parameters and optimizers ---------------------------------------------------------------


@rule_of_steps()
def no_optimizer(facts: StepFacts, state: State, patience: int = 3) -> Found:
    """Report a parameter that gets gradients, is in no optimizer, and never changes."""
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


@rule_of_steps()
def no_gradient(facts: StepFacts, state: State, patience: int = 20) -> Found:
    """Report a parameter that has never had a gradient in `patience` steps of its optimizer."""
    if not facts.optimizer_steps or facts.discarded:
        return
    idle = not any(each.gradient or each.changed for each in facts.parameters)
    if in_a_row(state, idle) >= patience:
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
        if each.name in had or not (each.trainable and each.in_optimizer):
            continue
        if in_a_row(state, True, name=f"steps {each.name}") < patience:
            continue
        why = "its module runs: is its output detached, or unused?"
        if not each.called:
            why = "its module has never run: is it called in forward()?"
        yield each.name, f"it has had no gradient in {patience} steps; {why}"


@rule_of_steps()
def frozen_changes(facts: StepFacts, state: State) -> Found:
    """Report a frozen parameter that the step of an optimizer changes."""
    for each in facts.parameters:
        if each.optimized_now and not each.trainable:
            message = (
                "it is frozen (requires_grad=False), but the optimizer changes it by momentum, "
                "weight decay or an old gradient; take it out of the optimizer"
            )
            yield each.name, message


@rule_of_steps()
def gradient_discarded(facts: StepFacts, state: State) -> Found:
    """Report gradients that are zeroed between the backward pass and the optimizer's step."""
    if facts.discarded:
        message = (
            "gradients are zeroed after the backward pass and before the optimizer's step, "
            "which changes nothing; call zero_grad() before backward(), or after step()"
        )
        yield MODEL, message


@rule_of_steps()
def gradient_not_zeroed(facts: StepFacts, state: State, patience: int = 2) -> Found:
    """Report gradients that are added to those of an earlier step of the optimizer."""
    if in_a_row(state, facts.carried) >= patience:
        message = (
            "gradients are added to those that the optimizer has already used; call "
            "zero_grad() after each step"
        )
        yield MODEL, message


@rule_of_steps()
def step_repeated(facts: StepFacts, state: State, patience: int = 2) -> Found:
    """Report an optimizer that uses the same gradients twice."""
    if in_a_row(state, facts.repeated) >= patience:
        message = (
            "the optimizer's step() is called twice with the same gradients; remove a call, or "
            "compute new gradients in between"
        )
        yield MODEL, message


@rule_of_steps(HINT)
def clipping(facts: StepFacts, state: State, patience: int = 10) -> Found:
    """Give a hint if gradients are changed after the optimizer has used them, and then zeroed."""
    if in_a_row(state, facts.changed_late) >= patience:
        message = (
            "gradients are changed after the optimizer has used them, and then zeroed: clip them "
            "between backward() and step()"
        )
        yield MODEL, message


@rule_of_steps()
def never_changes(facts: StepFacts, state: State, patience: int = 3) -> Found:
    """Report a parameter whose values no step changes, although its gradient is not 0.

    Every tenth step is looked at, and later every hundredth.
    """
    for each in facts.parameters:
        seen = () if each.stuck is None else (each.stuck,)
        if (seen or each.name in state) and in_a_row(state, *seen, name=each.name) >= patience:
            message = (
                "the optimizer does not change its values, although its gradient is not 0; in "
                "16 bits, small updates are lost in rounding: keep the weights in float32, or "
                "use a larger learning rate"
            )
            yield each.name, message


def _rates(facts: StepFacts) -> Iterator[tuple[str, float]]:
    """Yield the learning rates of a step in which an optimizer made one, with their names."""
    for number, rate in enumerate(facts.rates if facts.optimizer_steps else ()):
        yield f"learning rate of group {number}", rate


@rule_of_steps()
def learning_rate(facts: StepFacts, state: State, patience: int = 3, jump: float = 10.0) -> Found:
    """Report a learning rate that is 0, negative, or `jump` times larger than ever before."""
    for name, rate in _rates(facts):
        if in_a_row(state, rate == 0.0, name=f"zero {name}") >= patience:
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


@rule_of_steps(HINT)
def scheduler_per_batch(facts: StepFacts, state: State) -> Found:
    """Give a hint if a learning rate falls 50-fold by equal factors within the first 300 steps."""
    steps = in_a_row(state, *[True] * bool(facts.optimizer_steps))
    for name, rate in _rates(facts):
        last, first, factor, drops = state.get(name, (rate, rate, 0.0, 0))
        if 0.0 < rate < 0.999 * last and steps <= 300:  # no schedule by epochs drops often there
            ratio = rate / last
            same = abs(ratio - factor) < 1e-6 * ratio
            first, drops = (first, drops + 1) if same else (last, 1)
            factor = ratio
        state[name] = rate, first, factor, drops
        many = 3 if factor <= 0.5 else 20  # few large drops, or many small ones
        if drops >= many and first >= 50.0 * rate:
            message = (
                f"it fell from {first:.3g} to {rate:.3g} in {drops} equal drops within "
                f"{steps} steps: is the scheduler stepped per batch instead of per epoch?"
            )
            yield name, message


# -- structure -------------------------------------------------------------------------------


def _latest(state: State, facts: Any) -> Any:
    """Return facts that only some steps have, from the latest step that has them."""
    if facts is not None:
        state["latest"] = facts
    return state.get("latest", ())


def _is_sized_wrong(weight: InitialWeight, factor: float) -> bool:
    """Return whether the standard deviation is far from usual; of few values it may well be."""
    if not weight.inputs or weight.summary.count < 16:
        return False
    return not 1 / factor <= weight.summary.std * weight.inputs**0.5 <= factor


def _is_absurd(summary: Summary) -> bool:
    """Return whether a weight has a size that none has on purpose."""
    return summary.max_abs > 1e15 or 0.0 < summary.max_abs < 1e-30


@rule_of_steps()
def initialization(facts: StepFacts, state: State, factor: float = 100.0) -> Found:
    """Report weights that start all equal, like another weight, or with a wrong size.

    A weight is expected to have a standard deviation of about ``1/sqrt(fan_in)``; `factor` is how
    far off it may be. Weights that are all 0 are common on purpose. So is one value in all of a
    bias or norm, of which only values that nobody can have meant are reported.
    """
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


@rule_of_steps()
def not_registered(facts: StepFacts, state: State) -> Found:
    """Report layers in a plain list or dict of a module, and tensors that are not parameters."""
    for name, count in _latest(state, facts.unregistered):
        message = (
            f"it holds {count} tensors that get gradients and that torch does not know as "
            "parameters: they are not trained, moved or saved; use nn.ModuleList, "
            "nn.ModuleDict, nn.ParameterList or nn.Parameter"
        )
        yield name, message


@rule_of_steps(HINT)
def repeated_layer(facts: StepFacts, state: State) -> Found:
    """Give a hint if one layer appears several times in a list of layers."""
    for name, count in state.setdefault("found", facts.repeated_layers):
        message = (
            f"the same layer stands in it {count} times, as after [layer] * {count}, with one "
            "set of weights; create each layer anew, unless weights are to be shared"
        )
        yield name, message


@rule_of_steps()
def untied(facts: StepFacts, state: State) -> Found:
    """Report parameters that were the same one when tracking began, and are not any more."""
    for first, other in _latest(state, facts.untied):
        yield other, f"it was tied to {first}, and is a parameter of its own now; tie it again"


# -- modes -----------------------------------------------------------------------------------


@rule_of_steps()
def training_in_eval(facts: StepFacts, state: State, patience: int = 3) -> Found:
    """Report a model with dropout or batch norm that is trained in ``eval()`` mode."""
    if in_a_row(state, facts.trained_in_eval) >= patience:
        message = (
            "it is trained in eval() mode: dropout is off and batch norm does not learn; call "
            "model.train() before training, and again after each evaluation"
        )
        yield MODEL, message


@rule_of_steps()
def dropout_in_evaluation(facts: StepFacts, state: State) -> Found:
    """Report dropout that is active while gradients are off, as in an evaluation."""
    for name in facts.dropout:
        message = (
            "dropout is active although gradients are off, so an evaluation is noisy; call "
            "model.eval() before it"
        )
        yield name, message


@rule_of_steps(HINT)
def gradients_in_evaluation(facts: StepFacts, state: State, patience: int = 3) -> Found:
    """Give a hint if gradients are recorded in ``eval()`` mode, and nobody uses them."""
    if in_a_row(state, *(each.unused for each in facts.passes if not each.training)) >= patience:
        message = (
            "gradients are recorded in an evaluation, which takes memory and time; use "
            "torch.no_grad() or torch.inference_mode()"
        )
        yield MODEL, message


@rule_of_steps(HINT)
def random_in_evaluation(facts: StepFacts, state: State, patience: int = 3) -> Found:
    """Give a hint if a model draws random numbers although all of it is in ``eval()`` mode."""
    if in_a_row(state, *(each.random for each in facts.passes if not each.training)) >= patience:
        message = (
            "it draws random numbers in eval() mode: F.dropout() needs training=self.training, and "
            "scaled_dot_product_attention dropout_p=0.0; ignore this if the model samples on "
            "purpose"
        )
        yield MODEL, message


# -- inputs ----------------------------------------------------------------------------------


def _first_training(facts: StepFacts) -> list[PassFacts]:
    return [each for each in facts.passes if each.training and each.gradients][:1]


@rule_of_steps(HINT)
def not_normalized(
    facts: StepFacts, state: State, largest: float = 20.0, patience: int = 3
) -> Found:
    """Give a hint if the root mean square of the inputs exceeds `largest`."""
    for each in _first_training(facts):
        rms = state["rms"] = each.input_rms or 0.0
        in_a_row(state, rms > largest)
    if in_a_row(state) >= patience:
        rms = state["rms"]
        yield MODEL, f"the model's input has a root mean square of {rms:.3g}: is it normalized?"


@rule_of_steps()
def input_scale(facts: StepFacts, state: State, factor: float = 10.0, patience: int = 2) -> Found:
    """Report inputs that are `factor` times larger or smaller in evaluation than in training."""
    for each in facts.passes:
        if not each.input_rms:
            continue
        if each.training:
            state["training"] = each.input_rms
        elif "training" in state:
            ratio = each.input_rms / state["training"]
            if in_a_row(state, not 1 / factor < ratio < factor):
                state["sizes"] = each.input_rms, state["training"]
    if in_a_row(state) >= patience:
        there, here = state["sizes"]
        message = (
            f"the model's input has a root mean square of {there:.3g} in evaluation and "
            f"{here:.3g} in training; normalize both in the same way"
        )
        yield MODEL, message


@rule_of_steps()
def input_ignored(facts: StepFacts, state: State, patience: int = 3) -> Found:
    """Report a model that gives the same output for every row of a batch."""
    if in_a_row(state, *(each.ignores_input for each in _first_training(facts))) >= patience:
        message = (
            "all rows of the output are the same, although those of the input differ: the loss "
            "does not depend on the input"
        )
        yield MODEL, message


# -- dtypes ----------------------------------------------------------------------------------


_AUTOCAST = {  # by where it is active although all layers compute in float32
    "": "",
    "after": "autocast is active in the backward pass or the optimizer's step, but not in the "
    "forward pass, so all layers compute in float32: call the model in torch.autocast(...)",
    "forward": "autocast is active where the model is called, but all of its layers compute in "
    "float32: does the model switch autocast off?",
}


@rule_of_steps()
def no_autocast(facts: StepFacts, state: State, patience: int = 3) -> Found:
    """Report autocast that is active although nothing is computed in 16 bits."""
    if facts.idle_autocast is not None:
        state["message"] = _AUTOCAST[facts.idle_autocast]
        in_a_row(state, state["message"])
    if in_a_row(state) >= patience:
        yield MODEL, state["message"]


RULES = (
    clipping(), frozen_changes(), gradient_discarded(), gradient_not_zeroed(), learning_rate(),
    never_changes(), no_gradient(), no_optimizer(), scheduler_per_batch(), step_repeated(),
    dropout_in_evaluation(), gradients_in_evaluation(), initialization(), input_ignored(),
    input_scale(), no_autocast(), not_normalized(), not_registered(), random_in_evaluation(),
    repeated_layer(), training_in_eval(), untied(),
)  # fmt: skip
