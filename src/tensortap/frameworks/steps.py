"""Facts about a training step, which hooks of a framework report to rules."""

from __future__ import annotations

from typing import NamedTuple

from tensortap.record import Summary


class ParameterFacts(NamedTuple):
    """Facts about one parameter in a step.

    `called` says whether its module has ever run, `gradient` whether it had a gradient, `changed`
    and `optimized_now` whether anything, or the step of an optimizer, changed it. `moved`:
    something else than its optimizer changed it. `stuck`: the step of an optimizer left its values
    as they were, with a gradient that is not 0; None if nobody looked.
    """

    name: str
    trainable: bool
    in_optimizer: bool
    called: bool
    gradient: bool
    changed: bool
    optimized_now: bool
    moved: bool
    stuck: bool | None


class GroupFacts(NamedTuple):
    """A group of parameters of an optimizer; `number` counts the groups of all optimizers."""

    number: int
    rate: float


class InitialWeight(NamedTuple):
    """A weight with at least two dimensions, before training; `inputs` is its fan-in, 0 if unknown.

    `digest` is equal for weights with the same values; empty for frozen ones.
    """

    name: str
    summary: Summary
    inputs: int
    digest: bytes


class StepFacts(NamedTuple):
    """Facts about a training step.

    `strays` counts tensors of the optimizers that the model does not have. `discarded`: gradients
    were zeroed between the backward pass and the step of an optimizer. `carried`: they were added
    to those of the last step. `repeated`: an optimizer used the same ones twice. `dropout` names
    dropout modules that were active while gradients were off. `initial` and `decayed_vectors`
    (norms and biases with weight decay) are given once. `untied`: pairs of parameters that were the
    same one. `unregistered`: attributes with parameters that torch does not know, and how many;
    both are None if nobody looked.
    """

    step: int
    parameters: tuple[ParameterFacts, ...]
    groups: tuple[GroupFacts, ...]
    optimizer_steps: int
    strays: int
    discarded: bool
    carried: bool
    repeated: bool
    trained_in_eval: bool
    dropout: tuple[str, ...]
    initial: tuple[InitialWeight, ...] = ()
    decayed_vectors: tuple[str, ...] = ()
    untied: tuple[tuple[str, str], ...] | None = None
    unregistered: tuple[tuple[str, int], ...] | None = None
