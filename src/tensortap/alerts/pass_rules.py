"""Rules over the forward passes of a model: modes, batches, and how the loss is computed."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable
from typing import Any

from tensortap.alerts.alert import ALERT, HINT
from tensortap.alerts.rules import Rule
from tensortap.alerts.steps import MODEL, Found, in_a_row, listed, of_steps
from tensortap.arguments import check_count, check_positive, checked
from tensortap.frameworks.steps import PassFacts, StepFacts

_FEW = 3  # batches that are too few
_GROUPS = 3  # of equal batches, that are no accident
_MANY_NEGATIVE = 0.2  # of the values of images, with mean 0
_SAME_ORDER = 16  # batches that come in the same order as in the first epoch


def _of_passes(
    name: str,
    patience: int,
    concerns: Callable[[PassFacts], bool],
    problem: Callable[[PassFacts], str],
    severity: str = ALERT,
    most: int | None = 1,
) -> Rule:
    """Return a rule that looks at the first `most` passes of each step that concern it.

    It reports a problem of `patience` such passes in a row.
    """
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        for each in itertools.islice(filter(concerns, facts.passes), most):
            message = problem(each)
            in_a_row(state, MODEL, bool(message))
            state["message"] = message or state.get("message")
        if state.get(MODEL, 0) >= patience:
            yield MODEL, state["message"]

    return of_steps(check, name, severity)


def _trains(each: PassFacts) -> bool:
    return each.training and each.gradients and each.whole


def _has_loss(each: PassFacts) -> bool:
    return each.loss is not None


# -- modes -----------------------------------------------------------------------------------


def batch_norm_in_evaluation() -> Rule:
    """Give a hint if batch norm changes its running statistics while gradients are off."""

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        if facts.batch_norm:
            message = (
                f"batch norm ({listed(facts.batch_norm)}) changes its running statistics although "
                "gradients are off; call model.eval() before an evaluation. GANs, momentum "
                "encoders and update_bn() do this on purpose"
            )
            yield MODEL, message

    return of_steps(check, "batch_norm_in_evaluation", HINT)


@checked
def gradients_in_evaluation(patience: int = 3) -> Rule:
    """Give a hint if gradients are recorded in ``eval()`` mode, and nobody uses them."""
    message = (
        "gradients are recorded in an evaluation, which takes memory and time; use "
        "torch.no_grad() or torch.inference_mode()"
    )
    return _of_passes(
        "gradients_in_evaluation",
        patience,
        lambda each: not each.training and each.whole,
        lambda each: message if each.gradients and each.unused else "",
        HINT,
        most=None,
    )


@checked
def random_in_evaluation(patience: int = 3) -> Rule:
    """Give a hint if a model draws random numbers although all of it is in ``eval()`` mode."""
    message = (
        "it draws random numbers in eval() mode: F.dropout() needs training=self.training, and "
        "scaled_dot_product_attention dropout_p=0.0; ignore this if the model samples on purpose"
    )
    return _of_passes(
        "random_in_evaluation",
        patience,
        lambda each: not each.training and each.whole,
        lambda each: message if each.random else "",
        HINT,
        most=None,
    )


# -- batches ---------------------------------------------------------------------------------


def _digest(facts: StepFacts) -> bytes | None:
    found = (e.input.digest for e in facts.passes if e.training and e.gradients and e.input)
    return next(found, None)


@checked
def same_batch(patience: int = 20) -> Rule:
    """Give a hint if the last `patience` batches are at most 3 different ones."""
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        batches = state.setdefault("batches", collections.deque(maxlen=patience))
        if (digest := _digest(facts)) is not None:
            batches.append(digest)
        count = len(set(batches))
        if len(batches) == patience and count <= min(_FEW, patience // 2):
            which = "the same" if count == 1 else f"only {count} different ones"
            message = (
                f"the last {patience} batches are {which}; ignore this if the model is to fit them"
            )
            yield MODEL, message

    return of_steps(check, "same_batch", HINT)


def identical_workers() -> Rule:
    """Give a hint if batches come in groups of equal ones, as from workers with equal seeds."""

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        batches = state.setdefault("batches", [])
        if (digest := _digest(facts)) is not None and len(batches) < 100:
            batches.append(digest)
        sizes = [len(list(group)) for _, group in itertools.groupby(batches)]
        sizes = sizes[1:-1]  # the others may not be whole
        if len(sizes) >= _GROUPS and set(sizes) == {size := sizes[0]} and size > 1:
            message = (
                f"each batch comes {size} times in a row; if a DataLoader has {size} workers, they "
                "draw the same random numbers: seed each of them differently in worker_init_fn, "
                "and create generators in the worker"
            )
            yield MODEL, message

    return of_steps(check, "identical_workers", HINT)


def not_shuffled() -> Rule:
    """Report a DataLoader that is to shuffle, and gives the same batches in every epoch."""

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        lengths = facts.schedule.shuffled
        digest = _digest(facts) if lengths else None
        if digest is not None and state.get("same", 0) < _SAME_ORDER:
            _compare_epochs(state, digest)
        period, share = state.get("period", 0), max(facts.accumulated, 1)
        possible = {n for length in lengths for n in (length, length // share, -(-length // share))}
        if state.get("same", 0) >= _SAME_ORDER and period > _FEW and period in possible:
            message = (
                f"a DataLoader is to shuffle, but the same batches come every {period} steps: call "
                "set_epoch() of a DistributedSampler, do not seed a generator in each epoch, and "
                "do not keep batches, as itertools.cycle() does"
            )
            yield MODEL, message

    return of_steps(check, "not_shuffled")


def _compare_epochs(state: dict[str, Any], digest: bytes) -> None:
    """Note how many batches are the same as at the beginning, since its first one came again."""
    first: list[bytes] = state.setdefault("first", [])
    count = state["count"] = state.get("count", -1) + 1
    if "period" in state:
        same = digest == first[state["same"] % state["period"]]
        state["same"] = state["same"] + 1 if same else -math.inf  # other orders need no more looks
    elif first and digest == first[0]:
        state.update(period=count, same=1)
    elif count < _SAME_ORDER:
        first.append(digest)


@checked
def constant_input(patience: int = 3) -> Rule:
    """Give a hint if all values, or all rows, of the batches are the same."""

    def problem(each: PassFacts) -> str:
        if each.input is None or not (each.input.constant or each.input.equal_rows):
            return ""
        what = "values" if each.input.constant else "rows"
        return f"all {what} of the model's input are the same; look at how batches are made"

    return _of_passes("constant_input", patience, _trains, problem, HINT)


@checked
def not_normalized(largest: float = 20.0, patience: int = 3) -> Rule:
    """Give a hint if the root mean square of the inputs exceeds `largest`."""
    check_positive("largest", largest)

    def problem(each: PassFacts) -> str:
        rms = each.input.rms if each.input is not None else None
        if rms is None or rms <= largest:
            return ""
        return f"the model's input has a root mean square of {rms:.3g}: is it normalized?"

    return _of_passes("not_normalized", patience, _trains, problem, HINT)


@checked
def input_scale(factor: float = 10.0, patience: int = 2) -> Rule:
    """Report inputs that are `factor` times larger or smaller in evaluation than in training."""
    check_positive("factor", factor)
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        for each in facts.passes:
            if each.input is None or not each.input.rms:
                continue
            if each.training:
                state["training"] = each.input.rms
            elif "training" in state:
                ratio = each.input.rms / state["training"]
                if in_a_row(state, MODEL, not 1 / factor < ratio < factor):
                    state["sizes"] = each.input.rms, state["training"]
        if state.get(MODEL, 0) >= patience:
            there, here = state["sizes"]
            message = (
                f"the model's input has a root mean square of {there:.3g} in evaluation and "
                f"{here:.3g} in training; normalize both in the same way"
            )
            yield MODEL, message

    return of_steps(check, "input_scale")


@checked
def other_normalization(patience: int = 2) -> Rule:
    """Give a hint if images have negative values only in training, or only in evaluation."""
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        for each in facts.passes:
            share = each.input.negative if each.input is not None else None
            if share is None:
                continue
            if each.training:
                state["training"] = share
            elif "training" in state:
                here = state["training"]
                in_a_row(state, MODEL, max(here, share) >= _MANY_NEGATIVE and not min(here, share))
                state["shares"] = share, here
        if state.get(MODEL, 0) >= patience:
            there, here = state["shares"]
            message = (
                f"{there:.0%} of the values of images are negative in evaluation and {here:.0%} in "
                "training: are both normalized in the same way?"
            )
            yield MODEL, message

    return of_steps(check, "other_normalization", HINT)


# -- the loss --------------------------------------------------------------------------------


@checked
def input_ignored(patience: int = 3) -> Rule:
    """Report a model that gives the same output for every row of a batch."""
    message = (
        "all rows of the output are the same, although those of the input differ: the loss does "
        "not depend on the input"
    )
    return _of_passes(
        "input_ignored", patience, _trains, lambda each: message if each.ignores_input else ""
    )


@checked
def output_ignored(patience: int = 3) -> Rule:
    """Report a loss that does not depend on the output of the model, though it is trained."""
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        passes = [each for each in facts.passes if _trains(each)]
        if passes and facts.optimizer_steps and any(each.gradient for each in facts.parameters):
            in_a_row(state, MODEL, all(each.unused for each in passes))
        if state.get(MODEL, 0) >= patience:
            message = (
                "parameters get gradients, but not through the output of the model: the loss does "
                "not depend on it; is it computed from something else?"
            )
            yield MODEL, message

    return of_steps(check, "output_ignored")


@checked
def softmax_twice(patience: int = 2) -> Rule:
    """Report a loss that applies softmax or sigmoid to an output that went through it already."""

    def problem(each: PassFacts) -> str:
        loss = each.loss
        if loss is None or not loss.applied_twice:
            return ""
        return (
            f"the loss applies {loss.function} to the output of the model, to which "
            f"{loss.function} was applied already: give it the values from before"
        )

    return _of_passes("softmax_twice", patience, _has_loss, problem)


@checked
def loss_gradient(patience: int = 2) -> Rule:
    """Report a softmax over the wrong dimension, and a likelihood without any softmax."""

    def problem(each: PassFacts) -> str:
        loss = each.loss
        if loss is not None and loss.wrong_axis is not None:
            return (
                f"the loss takes the softmax over dimension {loss.wrong_axis} of the output, not "
                "over the classes"
            )
        if loss is not None and loss.function == "none":
            return (
                "the loss takes the output of the model for log-probabilities, which it is not: "
                "apply log_softmax, or use cross_entropy instead of nll_loss"
            )
        return ""

    return _of_passes("loss_gradient", patience, _has_loss, problem)


@checked
def labels(patience: int = 2) -> Rule:
    """Report labels of binary cross-entropy that are neither 0 nor 1."""

    def problem(each: PassFacts) -> str:
        label = each.loss.wrong_label if each.loss is not None else None
        return f"binary cross-entropy gets labels such as {label:g}" if label is not None else ""

    return _of_passes("labels", patience, _has_loss, problem)


@checked
def not_divided(patience: int = 2) -> Rule:
    """Give a hint if gradients of several batches are added, each of them a mean of its own."""
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        scale = (facts.schedule.scale or 1.0) if facts.schedule.scaled else 1.0
        losses = [each.loss for each in facts.passes if each.loss is not None]
        weights = [loss.weight / scale for loss in losses if loss.weight]
        count = sum(each.training and each.gradients for each in facts.passes)
        seen = state["passes"] = state.get("passes", 0) + count  # since the optimizer's step
        if facts.optimizer_steps:
            state["passes"] = 0
        if weights and facts.accumulated > 1 and seen > 1 and not facts.carried:
            in_a_row(state, MODEL, all(abs(weight - 1) < 0.05 for weight in weights))
            state["count"] = facts.accumulated
        if state.get(MODEL, 0) >= patience:
            count = state["count"]
            message = (
                f"the gradients of {count} backward passes are added, and each loss is a mean: the "
                f"sum is {count} times too large for a mean over all; divide each loss by {count}"
            )
            yield MODEL, message

    return of_steps(check, "not_divided", HINT)


PASS_RULES: tuple[Rule, ...] = (
    batch_norm_in_evaluation(), constant_input(), gradients_in_evaluation(), identical_workers(),
    input_ignored(), input_scale(), labels(), loss_gradient(), not_divided(), not_normalized(),
    not_shuffled(), other_normalization(), output_ignored(), random_in_evaluation(), same_batch(),
    softmax_twice(),
)  # fmt: skip
