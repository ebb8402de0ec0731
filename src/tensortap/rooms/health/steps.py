"""Steps as rules see them: the facts that hooks report, and the monitor that shows them to rules.

A rule over steps is a generator ``rule(facts, state, **thresholds)``, where `state` is a dict that
it keeps between steps. It yields pairs of a name and a message.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tensortap.alerts.alert import ALERT, Alert
from tensortap.alerts.rules import Rule
from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.arguments import check_count, check_positive
from tensortap.core.record import Kind, Summary

if TYPE_CHECKING:
    from tensortap.rooms.track.observer import Observer
    from tensortap.rooms.track.observing import TrackHooks
    from tensortap.rooms.track.torch.track import TrackedModule

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
    optimized_now: bool  # the step of an optimizer changed it
    stuck: bool | None  # it did not, though the gradient is not 0; None if nobody looked


class InitialWeight(NamedTuple):
    """A weight before training."""

    name: str
    dimensions: int
    trainable: bool
    summary: Summary
    inputs: int  # its fan-in, 0 if unknown
    digest: bytes  # equal for weights with the same values; empty if it is not trained


class PassFacts(NamedTuple):
    """A forward pass of the model."""

    training: bool  # its mode
    gradients: bool  # whether they were recorded
    unused: bool  # it could have been differentiated, and was not
    ignores_input: bool  # rows of the output are the same, although those of the input differ
    input_rms: float | None  # root mean square of the first input, if that has floats
    random: bool  # it drew random numbers on the CPU with all modules in eval() mode


class StepFacts(NamedTuple):
    """Facts about a training step."""

    step: int
    parameters: tuple[ParameterFacts, ...]
    rates: tuple[float, ...]  # of the groups of all optimizers
    optimizer_steps: int
    strays: int  # tensors of the optimizers that the model does not have
    discarded: bool  # gradients were zeroed between the backward pass and the optimizer's step
    carried: bool  # gradients were added to those of the last step
    repeated: bool  # an optimizer used the same gradients twice
    changed_late: bool  # gradients were changed after the step that used them, and then zeroed
    trained_in_eval: bool
    dropout: tuple[str, ...]  # modules that were active while gradients were off
    passes: tuple[PassFacts, ...]  # those that were looked at
    # where autocast is active though layers compute in float32; None if nobody looked
    idle_autocast: Literal["", "forward", "after"] | None
    # once, before training: weights, and lists with one layer several times, and how often
    initial: tuple[InitialWeight, ...] = ()
    repeated_layers: tuple[tuple[str, int], ...] = ()
    # None if nobody looked: pairs of parameters that were the same one, and attributes with
    # parameters that torch does not know, and how many
    untied: tuple[tuple[str, str], ...] | None = None
    unregistered: tuple[tuple[str, int], ...] | None = None


# -- rules -----------------------------------------------------------------------------------


def rule_of_steps(severity: str = ALERT) -> Callable[[Callable[..., Found]], Callable[..., Rule]]:
    """Make a function that takes thresholds and returns a rule of a generator over steps."""

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
                kinds=frozenset(), of_steps=functools.partial(check, **given), severity=severity
            )
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

    def hooks(self, tracked: TrackedModule) -> TrackHooks:
        """Return hooks that show the steps of a torch model to the rules."""
        from tensortap.rooms.health.torch.steps import StepHooks

        return StepHooks(tracked, self._observer, self.check)

    def check(self, facts: StepFacts) -> None:
        """Show a step to the rules."""
        rank = ranks.rank_and_world_size()[0]
        for rule, state in self._rules:
            title, severity = rule.__name__, rule.__dict__["severity"]
            try:
                found = dict(rule.__dict__["of_steps"](facts, state))
            except Exception as error:
                pipeline.fault(title, error, "raised an error as an alert rule")
                continue
            lasting = self._lasting.get(title, ())
            self._lasting[title] = set(found)
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
