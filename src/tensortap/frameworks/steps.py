"""Facts about a training step, which hooks of a framework report to rules."""

from __future__ import annotations

from typing import Literal, NamedTuple

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
    """A weight before training; `inputs` is its fan-in, 0 if unknown.

    `digest` is equal for weights with the same values; empty for those that are not trained.
    """

    name: str
    dimensions: int
    trainable: bool
    summary: Summary
    inputs: int
    digest: bytes


class BatchFacts(NamedTuple):
    """The first tensor that a model was called with, as far as it was read.

    `constant`: all of its values are the same; `equal_rows`: all of its rows. `rms` is the root
    mean square of floats, `negative` the share of images' values that are below 0.
    """

    digest: bytes
    constant: bool | None = None
    equal_rows: bool | None = None
    rms: float | None = None
    negative: float | None = None


class LossFacts(NamedTuple):
    """Facts about a loss, derived from the gradient of the model's output.

    `function` is the one that the loss applies: softmax, sigmoid or none. `applied_twice`: the
    output is the result of that function already. `wrong_axis` is the dimension over which softmax
    is taken, if it is not that of the classes. `weight` is 1 for the mean over all rows.
    """

    function: str
    applied_twice: bool = False
    wrong_axis: int | None = None
    wrong_label: float | None = None
    weight: float | None = None


class PassFacts(NamedTuple):
    """A forward pass of the model: its mode, and whether gradients were recorded.

    `unused`: it could have been differentiated, and was not. `ignores_input`: all rows of the
    output are the same, although those of the input differ. `random`: it drew random numbers on the
    CPU with all modules in ``eval()`` mode. `whole` says whether more was looked at than the digest
    of the input.
    """

    training: bool
    gradients: bool
    whole: bool
    unused: bool = False
    ignores_input: bool = False
    input: BatchFacts | None = None
    loss: LossFacts | None = None
    random: bool = False


class ScheduleFacts(NamedTuple):
    """Actions of schedulers and gradient scalers between two steps of an optimizer.

    `steps`: how often the fastest scheduler was stepped, None if there is none. `early`: one was
    stepped between the backward pass and the step. `skipped_first`: one was stepped before the
    first step. `scaled`: a scaler made the step; `scale` is its scale, None if nobody looked.
    `shuffled`: the number of batches of each DataLoader that is to shuffle. `overrun` is the length
    of a cosine schedule that was stepped beyond it, where its rate rises again.
    """

    steps: int | None = None
    early: bool = False
    skipped_first: bool = False
    scaled: bool = False
    scale: float | None = None
    shuffled: tuple[int, ...] = ()
    overrun: int | None = None


class PrecisionFacts(NamedTuple):
    """The dtypes of a checked step: layers that computed in 16 bits, and in float32.

    `stored_in_float32`: all parameters are float32. `double`: the model returned float64, with
    neither inputs nor parameters of that dtype. `autocast` says where autocast was active:
    ``"forward"`` in the forward pass of the model, ``"after"`` only after it, or nowhere.
    """

    stored_in_float32: bool
    low: tuple[str, ...]
    full: tuple[str, ...]
    double: bool
    autocast: Literal["", "forward", "after"] = ""


class StepFacts(NamedTuple):
    """Facts about a training step.

    `strays` counts tensors of the optimizers that the model does not have. `accumulated`: so many
    backward passes added to the gradients of the last step of an optimizer. `discarded`: gradients
    were zeroed between the backward pass and the step of an optimizer. `carried`: they were added
    to those of the last step. `repeated`: an optimizer used the same ones twice. `dropout` names
    dropout modules that were active while gradients were off, `batch_norm` those that changed their
    running statistics. `passes`: forward passes that were looked at. `rescaled`: by which factor
    all gradients were multiplied before a step, None if that was not seen. `initial`,
    `decayed_vectors` (norms and biases with weight decay) and `repeated_layers` (lists in which one
    layer appears several times, and how often) are given once. `untied`: pairs of
    parameters that were the same one. `unregistered`: attributes with parameters that torch does
    not know, and how many. `rewritten`: parameters whose values were changed after the step of an
    optimizer. These three are None if nobody looked. `changed_late`: gradients were changed after
    the step that used them, and then zeroed.
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
    batch_norm: tuple[str, ...]
    accumulated: int
    passes: tuple[PassFacts, ...]
    schedule: ScheduleFacts
    precision: PrecisionFacts | None
    rescaled: float | None
    initial: tuple[InitialWeight, ...] = ()
    decayed_vectors: tuple[str, ...] = ()
    repeated_layers: tuple[tuple[str, int], ...] = ()
    untied: tuple[tuple[str, str], ...] | None = None
    unregistered: tuple[tuple[str, int], ...] | None = None
    rewritten: tuple[str, ...] | None = None
    changed_late: bool = False
