"""Facts about a training step, which hooks of a framework report to rules."""

from __future__ import annotations

from typing import Literal, NamedTuple

from tensortap.core.record import Summary


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


class PrecisionFacts(NamedTuple):
    """The dtypes of a checked step."""

    stored_in_float32: bool  # all parameters
    low: tuple[str, ...]  # layers that computed in 16 bits
    full: tuple[str, ...]  # layers that computed in float32
    double: bool  # the model returned float64, without inputs or parameters of that dtype
    autocast: Literal["", "forward", "after"] = ""  # active in the forward pass, or only after it


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
    precision: PrecisionFacts | None
    # once, before training: weights, and lists with one layer several times, and how often
    initial: tuple[InitialWeight, ...] = ()
    repeated_layers: tuple[tuple[str, int], ...] = ()
    # None if nobody looked: pairs of parameters that were the same one, and attributes with
    # parameters that torch does not know, and how many
    untied: tuple[tuple[str, str], ...] | None = None
    unregistered: tuple[tuple[str, int], ...] | None = None
