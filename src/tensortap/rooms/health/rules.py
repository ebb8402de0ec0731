"""Rules over training steps: bugs that raise no error. ``alerts=True`` uses all of them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator

from tensortap.alerts.alert import ALERT, HINT
from tensortap.alerts.monitor import RuleState
from tensortap.alerts.rules import Rule
from tensortap.core.arguments import check_count, check_positive
from tensortap.core.record import Kind, Record
from tensortap.rooms.health.steps import (
    MODEL,
    Found,
    PassFacts,
    State,
    StepFacts,
    in_a_row,
    names_in_a_row,
    rule_of_steps,
)


def _rule_of_fact(
    title: str,
    looks_for: str,
    fact: Callable[[StepFacts], bool | None],
    message: str,
    needs: str = "steps",
    severity: str = ALERT,
    *,
    name: str = MODEL,
    patience: int = 3,
) -> Callable[..., Rule]:
    """Make a rule of something that holds in `patience` steps in a row, where it is known."""

    def check(facts: StepFacts, state: State, patience: int = patience) -> Found:
        holds = fact(facts) if needs != "graph" or facts.losses else None
        if holds is not None and in_a_row(state, holds) >= patience:
            yield name, message

    check.__name__, check.__doc__ = title, looks_for
    return rule_of_steps(severity, needs)(check)


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
            f"no gradient has reached a parameter in {patience} steps: is the loss computed from "
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


gradient_discarded = _rule_of_fact(
    "gradient_discarded",
    "Report gradients that are zeroed between the backward pass and the optimizer's step.",
    lambda facts: facts.discarded,
    "gradients are zeroed after the backward pass and before the optimizer's step, which changes "
    "nothing; call zero_grad() before backward(), or after step()",
    patience=1,
)
gradient_zeroed = _rule_of_fact(
    "gradient_zeroed",
    "Give a hint if gradients of all but the last of three or more backward passes are zeroed.",
    lambda facts: facts.zeroed,
    "zero_grad() is called after each of several backward passes, and the optimizer uses the last "
    "one alone; to accumulate micro-batches, call it once per step",
    severity=HINT,
)
gradient_not_zeroed = _rule_of_fact(
    "gradient_not_zeroed",
    "Report gradients that are added to those of an earlier step of the optimizer.",
    lambda facts: facts.carried,
    "gradients are added to those that the optimizer has already used; call zero_grad() after each "
    "step",
    patience=2,
)


@rule_of_steps(HINT)
def mostly_frozen(facts: StepFacts, state: State, patience: int = 3) -> Found:
    """Give a hint if an optimizer has all parameters, and all but the last ones are frozen."""
    held = [each for each in facts.parameters if each.in_optimizer]
    frozen = [each.name for each in held if not each.trainable]
    first = next((n for n, each in enumerate(held) if each.trainable), 0)
    at_end = all(each.trainable for each in held[first:])  # adapters are everywhere
    if in_a_row(state, at_end and 2 * len(frozen) > len(held)) >= patience:
        message = (
            f"{len(frozen)} of the {len(held)} parameters that the optimizer was given are frozen "
            f"(requires_grad=False), from {frozen[0]} on; is only the rest to be trained?"
        )
        yield MODEL, message


@rule_of_steps(HINT)
def weight_decay(facts: StepFacts, state: State, most: float = 0.005) -> Found:
    """Give a hint if weight decay takes more than the share `most` of each weight per step."""
    for number, (rate, decay) in enumerate(zip(facts.rates, facts.decays, strict=False)):
        if facts.optimizer_steps and rate * decay > most:
            message = (
                f"a weight decay of {decay:.3g} with a learning rate of {rate:.3g} takes "
                f"{rate * decay:.2%} of each weight in every step"
            )
            yield f"group {number}", message


def _rates(facts: StepFacts) -> Iterator[tuple[str, float]]:
    """Yield the learning rates of a step in which an optimizer made one, with their names."""
    for number, rate in enumerate(facts.rates if facts.optimizer_steps else ()):
        yield f"learning rate of group {number}", rate


@rule_of_steps()
def learning_rate(facts: StepFacts, state: State, patience: int = 3) -> Found:
    """Report a learning rate that is 0 or negative."""
    for name, rate in _rates(facts):
        if in_a_row(state, rate == 0.0, name=f"zero {name}") >= patience:
            yield name, f"it has been 0 for {patience} steps, so nothing is learned"
        if rate < 0.0:
            yield name, f"it is negative ({rate:.3g}), so the loss is made larger"


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


@rule_of_steps()
def initialization(facts: StepFacts, state: State) -> Found:
    """Report weights that start all equal, as a copy of another one, or not finite.

    Weights that are all 0 are common on purpose. So is one value in all of a bias or norm.
    """
    first: dict[bytes, str] = {}
    for weight in facts.initial:
        summary = weight.summary
        if summary.finite != summary.count:
            yield weight.name, "it starts with values that are not finite: is it initialized?"
        elif weight.dimensions > 1 and summary.std == 0.0 and summary.count > 1 and summary.max_abs:
            message = f"all of its values start as {summary.max:.6g}, so its units stay identical"
            yield weight.name, f"{message}: initialize them with random numbers"
        elif weight.digest and (other := first.setdefault(weight.digest, weight.name)):
            if other != weight.name:
                message = (
                    f"it starts as a copy of {other}, and both are trained, so they drift apart: "
                    "share the parameter if they are to be tied, or initialize it anew"
                )
                yield weight.name, message


@rule_of_steps()
def not_registered(facts: StepFacts, state: State) -> Found:
    """Report layers in a plain list or dict of a module, and tensors that are not parameters."""
    if facts.unregistered is not None:  # only some steps are looked at
        state["latest"] = facts.unregistered
    for name, count in state.get("latest", ()):
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


# -- modes -----------------------------------------------------------------------------------


training_in_eval = _rule_of_fact(
    "training_in_eval",
    "Report a model with dropout, batch or spectral norm that is trained in ``eval()`` mode.",
    lambda facts: facts.trained_in_eval,
    "it is trained in eval() mode: dropout is off, batch and spectral norm do not learn; call "
    "model.train() before training, and again after each evaluation",
)


@rule_of_steps(needs="evaluation")
def dropout_in_evaluation(facts: StepFacts, state: State) -> Found:
    """Report dropout that is active while gradients are off, as in an evaluation."""
    for name in facts.dropout:
        message = (
            "dropout is active although gradients are off, so an evaluation is noisy; call "
            "model.eval() before it"
        )
        yield name, message


@rule_of_steps(HINT, "evaluation")
def random_in_evaluation(facts: StepFacts, state: State, patience: int = 3) -> Found:
    """Give a hint if a model draws random numbers although all of it is in ``eval()`` mode."""
    for probe in facts.probes:
        state["sampled"] = probe.random == "sampling"
    is_random = (each.random for each in facts.passes if not each.training)
    if in_a_row(state, *is_random) >= patience and not state.get("sampled"):
        message = (
            "it draws random numbers in eval() mode: F.dropout() needs training=self.training, and "
            "scaled_dot_product_attention dropout_p=0.0"
        )
        yield MODEL, message


# -- inputs ----------------------------------------------------------------------------------


def _first_training(facts: StepFacts) -> list[PassFacts]:
    return [each for each in facts.passes if each.training and each.gradients][:1]


@rule_of_steps(HINT, "training")
def not_normalized(
    facts: StepFacts, state: State, largest: float = 20.0, patience: int = 3
) -> Found:
    """Give a hint if the root mean square of the inputs exceeds `largest`."""
    for each in _first_training(facts):
        rms = each.input_rms or 0.0
        if in_a_row(state, rms > largest) >= patience:
            yield MODEL, f"the model's input has a root mean square of {rms:.3g}: is it normalized?"


@rule_of_steps(HINT, "training")
def input_drift(facts: StepFacts, state: State, factor: float = 2.0, patience: int = 2) -> Found:
    """Give a hint if inputs of training grow or shrink by `factor`, as data changed in place do.

    In each third of the training, all of them are larger than in the third before, or all smaller:
    other batches, a first one that differs, and another data set do not do that.
    """
    seen: list[float] = state.setdefault("seen", [])
    seen += [each.input_rms for each in _first_training(facts) if each.input_rms]
    if len(seen) > 60:
        del seen[1::2]
    if (third := len(seen) // 3) >= patience:
        first, middle, last = seen[:third], seen[third:-third], seen[-third:]
        grows = max(first) < min(middle) and max(middle) < min(last)
        shrinks = min(first) > max(middle) and min(middle) > max(last)
        if (grows or shrinks) and not 1 / factor < seen[-1] / seen[0] < factor:
            message = (
                f"its inputs have changed their root mean square from {seen[0]:.3g} to "
                f"{seen[-1]:.3g} during training: is the data set changed in place?"
            )
            yield MODEL, message


# -- the loss and its labels -------------------------------------------------------------------


@rule_of_steps(needs="graph")
def applied_twice(facts: StepFacts, state: State) -> Found:
    """Report softmax or sigmoid that both the model and the loss apply."""
    for each in facts.losses:
        if each.twice:
            message = (
                f"the loss applies {each.twice} to what {each.twice} was already applied to, which "
                "flattens gradients; give the loss logits"
            )
            yield "loss", message


@rule_of_steps(needs="graph")
def broken_loss(facts: StepFacts, state: State) -> Found:
    """Report the operation of a loss that made it infinite or NaN."""
    for each in facts.losses:
        if each.broken:
            message = f"it is not finite: {each.broken}; add a small number, or clamp"
            yield "loss", message


@rule_of_steps(needs="graph")
def not_log_probabilities(facts: StepFacts, state: State, patience: int = 2) -> Found:
    """Report a loss over log-probabilities (`nll_loss`, `kl_div`) that gets something else."""
    for each in facts.losses:
        if in_a_row(state, bool(each.raw)) >= patience:
            message = (
                f"{each.raw} gets values that are no log-probabilities, so it falls below 0; give "
                "it the outputs of log_softmax"
            )
            yield "loss", message


cut_logits = _rule_of_fact(
    "cut_logits",
    "Give a hint if the logits of a loss end in a ReLU.",
    lambda facts: any(each.is_cut for each in facts.losses),
    "its logits end in a ReLU: none is below 0, so no class can be made unlikely; remove this ReLU",
    "graph", HINT, name="loss",
)  # fmt: skip


@rule_of_steps(needs="graph")
def loss_broadcasts(facts: StepFacts, state: State, patience: int = 2) -> Found:
    """Report predictions of shape (N, 1) that a target of shape (N,) broadcasts to (N, N)."""
    for each in facts.losses:
        if in_a_row(state, each.broadcast) >= patience and each.broadcast is not None:
            own, whole = each.broadcast
            message = (
                f"predictions of shape {own} are broadcast to {whole} in the loss, which compares "
                "each one with all targets; give both the same shape"
            )
            yield "loss", message


target_gradient = _rule_of_fact(
    "target_gradient",
    "Give a hint if gradients flow through the target of a loss.",
    lambda facts: any(each.target_needs_gradient for each in facts.losses),
    "gradients flow through the target of the loss as well; compute it in torch.no_grad(), or "
    "detach() it, unless both sides are to be trained",
    "graph", HINT, name="loss",
)  # fmt: skip


@rule_of_steps(needs="labels")
def labels_ignored(facts: StepFacts, state: State, patience: int = 2) -> Found:
    """Report labels that are all masked by `ignore_index`."""
    for each in facts.losses:
        if each.kept is not None and in_a_row(state, each.kept == 0) >= patience:
            message = (
                f"all labels of the batch are {each.ignored}, which the loss ignores, so there "
                "is nothing to learn from; check how labels are masked"
            )
            yield "labels", message


@rule_of_steps(HINT, "labels")
def odd_labels(facts: StepFacts, state: State, patience: int = 5) -> Found:
    """Give a hint if labels are all the same, or are part of the input."""
    for each in facts.losses:
        if each.kept and each.kept >= 8:
            classes = state.setdefault("classes", set())
            if in_a_row(state, each.only is not None, name="one class") == 0:
                classes.clear()
            classes.add(each.only)
        looks = in_a_row(state, each.value is not None, name="looks")
        if looks <= 3 and each.value is not None and each.counts is not None:
            classes = int((each.counts > 0).sum())
            if in_a_row(state, 0 <= each.value < 1e-3 and classes > 1, name="near 0") >= 3:
                yield "loss", "it is near 0 from the start: does the input contain the labels?"
        if in_a_row(state, each.relation == "equal", name="equal") >= 2:
            message = (
                "the labels are the same tokens as the input, not shifted by one: the model learns "
                "to copy its input"
            )
            yield "labels", message
        if in_a_row(state, each.relation.startswith("column"), name="column") >= 2:
            message = f"the target is a copy of {each.relation} of the input: the answer is given"
            yield "labels", message
    if in_a_row(state, name="one class") >= patience:
        classes = state["classes"]
        if len(classes) == 1:
            message = f"all labels so far are the same class, {next(iter(classes))}"
        else:
            message = "each batch has labels of one class only: shuffle the data"
        yield "labels", message


@rule_of_steps(HINT, "labels")
def not_learning(facts: StepFacts, state: State, share: float = 0.95, patience: int = 40) -> Found:
    """Give a hint if the loss is no better than the best constant answer after `patience` steps."""
    steps = in_a_row(state, *[True] * bool(facts.optimizer_steps), name="steps")
    for each in facts.losses[:1]:
        chance = each.chance
        if each.counts is not None and each.value is not None:
            counts = state.get("counts", 0)
            state["counts"] = counts = [
                a + b for a, b in itertools.zip_longest(
                    counts or [], each.counts.tolist(), fillvalue=0)
            ]  # fmt: skip
            total = sum(counts)
            chance = -sum(n / total * math.log(n / total) for n in counts if n)
        if chance and each.value is not None and math.isfinite(each.value):
            state.setdefault("shares", []).append((steps, each.value / chance, each.value, chance))
    if facts.losses:
        state["verdict"] = _stays_at_chance(facts, state, steps, share, patience)
    # some are slow at first: a short training is judged at its end
    if state.get("verdict") and (facts.ended or steps >= _LONG):
        yield "loss", state["verdict"]


def _stays_at_chance(
    facts: StepFacts, state: State, steps: int, share: float, patience: int
) -> str:
    """Return what to check about a loss that stays at chance; empty if it does not."""
    late = [each for each in state.get("shares", ()) if each[0] > patience // 2]
    classes = sum(n > 0 for n in state.get("counts", ()))
    if steps < patience * max(1.0, classes / 10) or len(late) < 4:  # many of them take longer
        return ""
    recent, first = late[-8:], state["shares"][:3]
    mean = sum(each[1] for each in recent) / len(recent)
    before = sum(each[1] for each in first) / len(first)
    error = statistics.stdev(each[1] for each in recent) / math.sqrt(len(recent))
    is_better = mean + 2 * error < min(1.0, before)  # than the best constant answer: it is slow
    # numbers may begin far off, and answers that move hide progress: only a loss that stays counts
    if mean >= share and not is_better and ("counts" in state or 0.95 * before <= mean):
        _, _, value, chance = recent[-1]
        rate = max(facts.rates, default=0.0)
        frozen = sum(not each.trainable for each in facts.parameters)
        kept = f"; {frozen} of {len(facts.parameters)} parameters are frozen" if frozen else ""
        return (
            f"it does not learn: after {steps} steps the loss is {value:.4g}, and the best "
            f"constant answer has {chance:.4g}; check that inputs and labels belong together, "
            f"that the input reaches the output, and the learning rate ({rate:.3g}){kept}"
        )
    return ""


@rule_of_steps(HINT, "graph")
def accumulation(facts: StepFacts, state: State, patience: int = 3) -> Found:
    """Give a hint if mean losses of three or more passes add up without a division."""
    means = [each.is_mean for each in facts.losses]
    if means and in_a_row(state, len(means) >= 3 and all(means)) >= patience:
        message = (
            f"gradients of {len(means)} mean losses add up in a step: divide each loss by their "
            "number, or the learning rate is as many times larger"
        )
        yield "loss", message


# -- what a second call shows --------------------------------------------------------------------


@rule_of_steps(needs="probe")
def sees_the_future(facts: StepFacts, state: State) -> Found:
    """Report a model that predicts the next token, and whose outputs depend on later tokens."""
    if any(each.relation == "shifted" for each in facts.losses):
        state["shifted"] = True
    if any(each.later for each in facts.probes):
        state["later"] = True
    if state.get("shifted") and state.get("later"):
        message = (
            "it is to predict the next token, but its outputs depend on later tokens: a causal "
            "mask is missing or inverted, or a softmax or reshape uses the wrong dimension"
        )
        yield MODEL, message


@rule_of_steps(HINT, "probe")
def rows_mixed(facts: StepFacts, state: State) -> Found:
    """Give a hint if rows of a batch influence each other in ``eval()`` mode."""
    for each in facts.probes:
        if each.rows and each.batch_is_first:
            message = (
                f"rows of the batch influence each other in eval() mode: another row "
                f"{each.rows[0]} changes the outputs of other rows; look for batch_first, and for "
                "a mean, softmax or reshape over the batch"
            )
            yield MODEL, message


@rule_of_steps(HINT, "training")
def batch_norm(facts: StepFacts, state: State, patience: int = 10, distance: float = 0.8) -> Found:
    """Give a hint if batch norm is trained with single rows, or computes otherwise in evaluation.

    `distance` is how far outputs may be in ``eval()`` mode from those of the same batch in
    training, as a share of their size.
    """
    for name in names_in_a_row(state, facts.small_batches, patience):
        message = (
            "batch norm is trained with batches of one row, whose statistics say little: "
            "evaluation differs; use larger batches, or group norm"
        )
        yield name, message
    far = facts.mode_distance or 0.0
    if far > distance:
        message = (
            f"with batch norm or spectral norm in eval() mode, the outputs of a training batch "
            f"differ by {far:.0%} of their size: what the norm remembers does not fit"
        )
        yield MODEL, message


# -- the data ------------------------------------------------------------------------------------


same_batch = _rule_of_fact(
    "same_batch",
    "Give a hint if each of `patience` steps gets the same batch.",
    lambda facts: facts.same_input,
    "it has got the same batch in all of these steps: next(iter(loader)) begins anew each time",
    "training", HINT, patience=10,
)  # fmt: skip


@rule_of_steps(HINT, "training")
def one_index(facts: StepFacts, state: State) -> Found:
    """Give a hint if an embedding gets the same index for everything."""
    for name, index in facts.one_index:
        yield name, f"all of its indices are {index}: are the values scaled or cut off before?"


padding = _rule_of_fact(
    "padding",
    "Give a hint if the loss depends on padding at the end of sequences.",
    lambda facts: facts.padding,
    "the loss depends on padding at the end of sequences: mask it in attention and pooling, and "
    "read the last real position",
    "training", HINT,
)  # fmt: skip


# -- what only `tensortap run` sees ---------------------------------------------------------------


def _rule_of_notes(name: str, looks_for: str, severity: str = ALERT) -> Callable[..., Rule]:
    """Make a rule of notes: their keys are its name and perhaps that of a module."""

    def check(facts: StepFacts, state: State) -> Found:
        for key, text in facts.notes:
            if key.partition(" ")[0] == name:
                yield key.partition(" ")[2] or MODEL, text

    check.__name__, check.__doc__ = name, looks_for
    return rule_of_steps(severity, "run")(check)


clipping = _rule_of_notes("clipping", "Report gradients that are clipped before `backward()`.")
new_optimizer = _rule_of_notes(
    "new_optimizer", "Give a hint if an optimizer is created anew for each step.", HINT
)
loss_scaling = _rule_of_notes(
    "loss_scaling", "Report gradients that are clipped or used before they are unscaled."
)
nothing_loaded = _rule_of_notes(
    "nothing_loaded", "Report a `load_state_dict(strict=False)` that loaded nothing."
)
stale_copy = _rule_of_notes(
    "stale_copy", "Give a hint if a copy of the model is called and never changes.", HINT
)


# -- statistics ----------------------------------------------------------------------------------


def hardly_changes(steps: int = 30, share: float = 1e-5) -> Rule:
    """Report a training in which no weight has changed by more than `share` in `steps` steps."""
    check_count("steps", steps)
    check_positive("share", share)

    def rule(record: Record, state: RuleState) -> str | None:
        stats, known = record.stats, vars(state.step_state)
        if stats is None or known.get("moved"):
            return None
        if record.kind is Kind.WEIGHT_GRADIENT:
            known["trained"] = known.get("trained") or stats.rm2 > 0.0
            return None
        now = stats.rm2, stats.min, stats.max
        first, before = state.notes.setdefault("first", (record.step, now))
        size = before[0]
        if not size or not all(map(math.isfinite, now)):
            return None
        change = max(abs(a - b) for a, b in zip(now, before, strict=True)) / size
        late = (record.step - first) / steps  # within a budget, looks are far between
        known["moved"] = change > share * max(1.0, late)
        if known["moved"] or late < 1.0 or not known.get("trained"):
            return None
        if record.step == known.setdefault("due", record.step):
            return None  # other weights of this step may have moved
        known["moved"] = True  # one report is enough
        return (
            f"after {steps} steps, no weight has changed by more than {share:.0e} of its size: is "
            "the learning rate too small, or its warmup too long?"
        )

    rule.__name__ = "hardly_changes"
    rule.__dict__.update(kinds=_WEIGHTS, span=steps + 1)
    return rule


def never_changes(steps: int = 30) -> Rule:
    """Report a weight of a JAX program that gets gradients and is the same for `steps` steps."""
    check_count("steps", steps)

    def rule(record: Record, state: RuleState) -> str | None:
        stats, notes = record.stats, state.notes
        if stats is None or record.type != "jax.Array":  # in torch, other rules see it at once
            return None
        pulled = vars(state.step_state).setdefault("pulled", set())
        if record.kind is Kind.WEIGHT_GRADIENT:
            pulled.update([record.name] if stats.rm2 > 0.0 else ())
            return None
        now = stats.rm2, stats.min, stats.max
        if notes.setdefault("first", (record.step, now))[1] != now:
            notes["changed"] = True
        late = record.step - notes["first"][0] >= steps
        if "changed" in notes or not late or record.name not in pulled:
            return None
        return "it gets gradients and has not changed: is what the optimizer returned kept?"

    rule.__name__ = "never_changes"
    rule.__dict__.update(kinds=_WEIGHTS, span=steps + 1)
    return rule


_LONG = 300  # steps after which a loss at chance is reported during training
_WEIGHTS = frozenset((Kind.WEIGHT, Kind.WEIGHT_GRADIENT))
RULES = (
    gradient_discarded(), gradient_zeroed(), gradient_not_zeroed(), broken_loss(), learning_rate(),
    mostly_frozen(), no_gradient(), no_optimizer(), scheduler_per_batch(),
    weight_decay(), dropout_in_evaluation(),
    initialization(), input_drift(), not_normalized(),
    not_registered(), random_in_evaluation(), repeated_layer(), training_in_eval(),
    accumulation(), applied_twice(), labels_ignored(), loss_broadcasts(), not_learning(),
    not_log_probabilities(), cut_logits(), odd_labels(), target_gradient(), batch_norm(),
    rows_mixed(), sees_the_future(), one_index(), padding(), same_batch(), loss_scaling(),
    nothing_loaded(), stale_copy(), clipping(), new_optimizer(), hardly_changes(),
    never_changes(),
)  # fmt: skip
