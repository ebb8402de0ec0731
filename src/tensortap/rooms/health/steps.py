"""Steps as rules see them: the facts that hooks report, and the monitor that shows them to rules.

A rule over steps is a generator ``rule(facts, state, **thresholds)``, where `state` is a dict that
it keeps between steps. It yields pairs of a name and a message.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.alerts.alert import ALERT, Alert
from tensortap.alerts.rules import Rule
from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.arguments import check_count, check_positive
from tensortap.core.record import Kind, Record, Summary

if TYPE_CHECKING:
    from tensortap.rooms.track.observer import Observer
    from tensortap.rooms.track.observing import TrackHooks
    from tensortap.rooms.track.torch.track import TrackedModule

BLIND_RULES = "tensortap.blind"  # the name of records that say which rules could not look
MODEL = "model"  # the name in alerts that concern no single parameter
State = dict[str, Any]
Found = Iterator[tuple[str, str]]


class ParameterFacts(NamedTuple):
    """Facts about one parameter in a step."""

    name: str
    trainable: bool
    in_optimizer: bool
    called: bool  # whether its module has ever run
    gradient: bool  # whether it had one
    changed: bool  # by anything


class InitialWeight(NamedTuple):
    """A weight before training."""

    name: str
    dimensions: int
    summary: Summary
    digest: bytes  # equal for weights with the same values; empty if it is not trained


class PassFacts(NamedTuple):
    """A forward pass of the model."""

    training: bool  # its mode
    gradients: bool  # whether they were recorded
    input_rms: float | None  # root mean square of the first input, if that has floats
    random: bool  # it drew random numbers on the CPU with all modules in eval() mode


class LossFacts(NamedTuple):
    """Facts that the graph of a loss tells; its tensors are let go at the end of the step."""

    twice: str = ""  # "softmax" or "sigmoid", which model and loss both apply
    raw: str = ""  # a loss over log-probabilities that got something else
    is_cut: bool = False  # its logits end in a ReLU
    broadcast: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # shapes before and after
    target_needs_gradient: bool = False
    labels: Any = None  # of classes
    ignored: int = -100  # the label that does not count
    kept: int | None = None  # how many labels count
    counts: Any = None  # of each class
    only: int | None = None  # the class of all of them, if there is but one
    target: Any = None  # of a loss over numbers, if there is one per row
    value: float | None = None  # the loss over these labels alone
    chance: float | None = None  # that of the best constant answer
    is_mean: bool = False  # the mean over a batch, divided by nothing else
    broken: str = ""  # what made the loss infinite or NaN
    relation: str = ""  # of labels and inputs: "equal", "shifted", or the column that they are


class ProbeFacts(NamedTuple):
    """Facts that a second forward pass with changed inputs has shown."""

    why_not: str  # why there was none
    rows: tuple[int, ...] = ()  # those that change the outputs of other rows
    later: bool | None = None  # whether outputs depend on later places
    batch_is_first: bool = False  # whether it is certain that rows are those of the batch
    random: str = ""  # what is random in eval() mode: "dropout" or "sampling"


class StepFacts(NamedTuple):
    """Facts about a training step."""

    step: int
    parameters: tuple[ParameterFacts, ...]
    rates: tuple[float, ...]  # of the groups of all optimizers
    optimizer_steps: int
    strays: int  # tensors of the optimizers that the model does not have
    discarded: bool  # gradients were zeroed between the backward pass and the optimizer's step
    zeroed: bool  # those of several backward passes were, and the last ones were not
    carried: bool  # gradients were added to those of the last step
    trained_in_eval: bool
    dropout: tuple[str, ...]  # modules that were active while gradients were off
    passes: tuple[PassFacts, ...]  # those that were looked at
    # once, before training: weights, and lists with one layer several times, and how often
    initial: tuple[InitialWeight, ...] = ()
    repeated_layers: tuple[tuple[str, int], ...] = ()
    # None if nobody looked: attributes with parameters that torch does not know, and how many
    unregistered: tuple[tuple[str, int], ...] | None = None
    decays: tuple[float, ...] = ()  # weight decay of the groups of all optimizers
    losses: tuple[LossFacts, ...] = ()
    probes: tuple[ProbeFacts, ...] = ()  # of modules that are called one by one, or of the model
    mode_distance: float | None = None  # of outputs with batch norm in train() and in eval()
    small_batches: tuple[str, ...] = ()  # batch norms that were trained with a single row
    same_input: bool | None = None  # as in the last step, though in another tensor
    one_index: tuple[tuple[str, int], ...] = ()  # embeddings that got only one index, and which
    padding: bool | None = None  # whether the loss depends on padding; None if there is none
    seen: frozenset[str] = frozenset()  # what rules could look at
    notes: tuple[tuple[str, str], ...] = ()  # of `tensortap run`: keys, and details
    ended: bool = False  # whether this is no step, but the end of tracking


def empty_step(step: int) -> StepFacts:
    """Return the facts of a step in which nothing was seen."""
    return StepFacts(step, (), (), 0, 0, False, False, False, False, (), ())


# -- rules -----------------------------------------------------------------------------------


REASONS = {  # why a rule could not look, by what it needs
    "steps": "no step of an optimizer was seen",
    "training": "no call of the model in training was seen",
    "evaluation": "the model was not evaluated",
    "graph": "the graph of the loss was not seen, or is compiled",
    "labels": "the loss shows no labels",
    "probe": "the model was not called a second time",
    "run": "only tensortap run sees it",
}


def rule_of_steps(
    severity: str = ALERT, needs: str = "steps"
) -> Callable[[Callable[..., Found]], Callable[..., Rule]]:
    """Make a function that takes thresholds and returns a rule of a generator over steps.

    A rule could not look unless `needs` is in `StepFacts.seen` of some step.
    """

    def factory_of(check: Callable[..., Found]) -> Callable[..., Rule]:
        signature = inspect.signature(check)
        thresholds = signature.replace(parameters=list(signature.parameters.values())[2:])

        @functools.wraps(check)
        def make(*args: Any, **kwargs: Any) -> Rule:
            given = thresholds.bind(*args, **kwargs).arguments
            for name, value in given.items():
                is_count = thresholds.parameters[name].annotation == "int"
                (check_count if is_count else check_positive)(name, value)

            def rule(record: Any, state: Any) -> None:
                return None  # it looks at steps, not at records

            rule.__name__ = check.__name__
            rule.__dict__.update(
                kinds=frozenset(), of_steps=functools.partial(check, **given), severity=severity,
                needs=needs,
            )  # fmt: skip
            return rule

        make.__dict__["__signature__"] = thresholds
        return make

    return factory_of


def in_a_row(state: State, *holds: object, name: str = MODEL) -> int:
    """Return how often in a row a condition has held, after it was looked at again.

    >>> state = {}
    >>> [in_a_row(state, *seen) for seen in ((True, True), (), (True,), (False,))]
    [2, 2, 3, 0]
    """
    count: int = state.get(name, 0)
    for each in holds:
        count = count + 1 if each else 0
    state[name] = count
    return count


def names_in_a_row(state: State, names: Iterable[str], patience: int) -> list[str]:
    """Return the names that have been given for `patience` steps in a row.

    >>> state = {}
    >>> [names_in_a_row(state, names, 2) for names in ("ab", "b", "bc")]
    [[], ['b'], ['b']]
    """
    before = state.get("names", {})
    now = state["names"] = {name: before.get(name, 0) + 1 for name in names}
    return [name for name, count in now.items() if count >= patience]


class StepMonitor:
    """Shows steps to rules, and raises an alert when a problem appears, not while it lasts."""

    def __init__(self, rules: Iterable[Rule], observer: Observer) -> None:
        self._rules = [(rule, State()) for rule in rules]
        self._observer = observer
        self._lasting: dict[str, set[str]] = {}
        self._seen: set[str] = set()
        self._last: StepFacts | None = None
        self._why_not = ""  # why there was no second call
        self.notes: dict[str, str] | None = None  # what `tensortap run` has seen
        self.told: dict[str, set[str]] = {}  # `_lasting` of rules over notes, for all models

    def _tell(self, step: int) -> None:
        """Record which rules could not look until now, and why."""
        reasons = {**REASONS, **({"probe": self._why_not} if self._why_not else {})}
        blind = {
            rule.__name__: reasons[needs]
            for rule, _ in self._rules
            if (needs := rule.__dict__["needs"]) not in self._seen
        }
        rank, world_size = ranks.rank_and_world_size()
        text = "\n".join(f"{name}: {reason}" for name, reason in blind.items())
        record = Record(
            BLIND_RULES, Kind.VALUE, step, 0, pipeline.next_seq(), rank, world_size,
            time.time_ns(), "builtins.str", value=text,
        )  # fmt: skip
        self._observer.sent.offer(record)

    def hooks(self, tracked: TrackedModule) -> TrackHooks:
        """Return hooks that show the steps of a torch model to the rules."""
        from tensortap.rooms.health.torch.steps import StepHooks

        return StepHooks(tracked, self._observer, self.check)

    def check(self, facts: StepFacts) -> None:
        """Show a step to the rules."""
        seen = set(facts.seen)
        seen.update(["labels"] if any(each.value is not None for each in facts.losses) else ())
        for each in facts.probes:
            self._why_not = each.why_not
            seen.update(() if each.why_not else ["probe"])
        if self.notes is not None:
            seen.add("run")
            facts = facts._replace(notes=tuple(self.notes.items()))
        if facts.ended and self._last is not None:
            facts = facts._replace(step=self._last.step)
        if not seen <= self._seen or (facts.probes and self._why_not):
            self._seen |= seen
            self._tell(facts.step)
        self._last = facts
        self._apply(facts)

    def check_again(self) -> None:
        """Show the last step once more, with what was noted since."""
        if self._last is not None and self.notes:
            self._apply(empty_step(self._last.step)._replace(notes=tuple(self.notes.items())))

    def _apply(self, facts: StepFacts) -> None:
        rank = ranks.rank_and_world_size()[0]
        for rule, state in self._rules:
            title, severity = rule.__name__, rule.__dict__["severity"]
            try:
                found = dict(rule.__dict__["of_steps"](facts, state))
            except Exception as error:
                pipeline.fault(title, error, "raised an error as an alert rule")
                continue
            needs = rule.__dict__["needs"]
            known = self.told if needs == "run" else self._lasting
            lasting = known.get(title, set())
            # the others look at some steps only, or at what happens once
            once = needs not in ("steps", "evaluation")
            known[title] = set(found) | (lasting if once else set())
            for name, message in found.items():
                if name not in lasting:
                    module = name.rpartition(".")[0]
                    self._observer.raise_alert(Alert(
                        title, name, Kind.WEIGHT, facts.step, rank, module, message, module,
                        severity=severity,
                    ))  # fmt: skip


def monitor_of(observer: Observer) -> StepMonitor | None:
    """Return the monitor of the rules over steps; None if there is no such rule."""
    rules = [rule for rule in observer.rules if hasattr(rule, "of_steps")]
    return StepMonitor(rules, observer) if rules else None
