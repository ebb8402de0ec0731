"""Rules over a model: its structure, its modes, its batches and its dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tensortap.alerts.alert import HINT
from tensortap.alerts.rules import Rule
from tensortap.core.arguments import check_count, check_positive, checked
from tensortap.core.record import Summary
from tensortap.rooms.health.step_facts import InitialWeight, PassFacts, PrecisionFacts, StepFacts
from tensortap.rooms.health.steps import MODEL, Found, in_a_row, of_facts, of_model, of_steps

_FEW = 16  # values of a weight whose standard deviation says little
_TINY, _HUGE = 1e-30, 1e15  # sizes that no weight has on purpose


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are.

    >>> _listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _latest(state: dict[str, Any], facts: Any) -> Any:
    """Return facts that only some steps have, from the latest step that has them."""
    if facts is not None:
        state["latest"] = facts
    return state.get("latest", ())


# -- structure -------------------------------------------------------------------------------


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


def not_registered() -> Rule:
    """Report layers in a plain list or dict of a module, and tensors that are not parameters."""

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        for name, count in _latest(state, facts.unregistered):
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
        for first, other in _latest(state, facts.untied):
            message = f"it was tied to {first}, and is a parameter of its own now; tie it again"
            yield other, message

    return of_steps(check, "untied")


# -- modes -----------------------------------------------------------------------------------


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


def _evaluations(facts: StepFacts) -> Iterator[PassFacts]:
    return (each for each in facts.passes if not each.training)


@checked
def gradients_in_evaluation(patience: int = 3) -> Rule:
    """Give a hint if gradients are recorded in ``eval()`` mode, and nobody uses them."""
    message = (
        "gradients are recorded in an evaluation, which takes memory and time; use "
        "torch.no_grad() or torch.inference_mode()"
    )
    return of_facts(
        "gradients_in_evaluation",
        patience,
        _evaluations,
        lambda each: message if each.gradients and each.unused else "",
        HINT,
    )


@checked
def random_in_evaluation(patience: int = 3) -> Rule:
    """Give a hint if a model draws random numbers although all of it is in ``eval()`` mode."""
    message = (
        "it draws random numbers in eval() mode: F.dropout() needs training=self.training, and "
        "scaled_dot_product_attention dropout_p=0.0; ignore this if the model samples on purpose"
    )
    return of_facts(
        "random_in_evaluation",
        patience,
        _evaluations,
        lambda each: message if each.random else "",
        HINT,
    )


# -- inputs ----------------------------------------------------------------------------------


def _first_training(facts: StepFacts) -> list[PassFacts]:
    return [each for each in facts.passes if each.training and each.gradients][:1]


@checked
def not_normalized(largest: float = 20.0, patience: int = 3) -> Rule:
    """Give a hint if the root mean square of the inputs exceeds `largest`."""
    check_positive("largest", largest)

    def problem(each: PassFacts) -> str:
        if each.input_rms is None or each.input_rms <= largest:
            return ""
        return (
            f"the model's input has a root mean square of {each.input_rms:.3g}: is it normalized?"
        )

    return of_facts("not_normalized", patience, _first_training, problem, HINT)


@checked
def input_scale(factor: float = 10.0, patience: int = 2) -> Rule:
    """Report inputs that are `factor` times larger or smaller in evaluation than in training."""
    check_positive("factor", factor)
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        for each in facts.passes:
            if not each.input_rms:
                continue
            if each.training:
                state["training"] = each.input_rms
            elif "training" in state:
                ratio = each.input_rms / state["training"]
                if in_a_row(state, MODEL, not 1 / factor < ratio < factor):
                    state["sizes"] = each.input_rms, state["training"]
        if state.get(MODEL, 0) >= patience:
            there, here = state["sizes"]
            message = (
                f"the model's input has a root mean square of {there:.3g} in evaluation and "
                f"{here:.3g} in training; normalize both in the same way"
            )
            yield MODEL, message

    return of_steps(check, "input_scale")


@checked
def input_ignored(patience: int = 3) -> Rule:
    """Report a model that gives the same output for every row of a batch."""
    message = (
        "all rows of the output are the same, although those of the input differ: the loss does "
        "not depend on the input"
    )
    return of_facts(
        "input_ignored",
        patience,
        _first_training,
        lambda each: message if each.ignores_input else "",
    )


# -- dtypes ----------------------------------------------------------------------------------


_AUTOCAST = {  # by where it is active
    "": "",
    "after": "autocast is active in the backward pass or the optimizer's step, but not in the "
    "forward pass, so all layers compute in float32: call the model in torch.autocast(...)",
    "forward": "autocast is active where the model is called, but all of its layers compute in "
    "float32: does the model switch autocast off?",
}


def _precision(facts: StepFacts) -> tuple[PrecisionFacts, ...]:
    return () if facts.precision is None else (facts.precision,)


@checked
def no_autocast(patience: int = 3) -> Rule:
    """Report autocast that is active although nothing is computed in 16 bits."""

    def problem(found: PrecisionFacts) -> str:
        idle = found.stored_in_float32 and found.full and not found.low
        return _AUTOCAST[found.autocast] if idle else ""

    return of_facts("no_autocast", patience, _precision, problem)


@checked
def wide_layers(patience: int = 3) -> Rule:
    """Give a hint about layers that compute in float32 among others in 16 bits, or in float64."""

    def problem(found: PrecisionFacts) -> str:
        if found.double:
            return "the model returns float64: is it meant so?"
        if not (found.full and found.low):
            return ""
        return f"{_listed(found.full)} compute in float32, others in 16 bits: is it meant so?"

    return of_facts("wide_layers", patience, _precision, problem, HINT)


MODEL_RULES: tuple[Rule, ...] = (
    dropout_in_evaluation(), gradients_in_evaluation(), initialization(), input_ignored(),
    input_scale(), no_autocast(), not_normalized(), not_registered(), random_in_evaluation(),
    repeated_layer(), training_in_eval(), untied(), wide_layers(),
)  # fmt: skip
