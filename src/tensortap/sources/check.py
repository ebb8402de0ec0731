"""`check`: a few steps on one batch tell whether a model, its loss and its batches make sense."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tensortap.arguments import check_callable, check_count, checked
from tensortap.frameworks.experiments import LossFact, ModelExperiments
from tensortap.frameworks.registry import loaded_frameworks
from tensortap.frameworks.replaying import KeptBatch, Training
from tensortap.sources.rewound import rewound

_ABOVE_CHANCE = 1.0  # what a loss may exceed that of uniform probabilities by, in nats
_TIMES_TARGETS = 10.0  # how often a squared or absolute error may exceed the size of targets
_LITTLE = 0.01  # the share by which a loss should fall at least

EXPERIMENTS = ("initial_loss", "rows", "evaluation", "overfit", "workers")


class Experiment(NamedTuple):
    """The result of an experiment; `state` is ``"unknown"`` if the experiment was impossible."""

    name: str
    state: Literal["fine", "hint", "problem", "unknown"]
    message: str


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The results of all experiments with a model; true if none found a problem."""

    experiments: tuple[Experiment, ...]

    @property
    def ok(self) -> bool:
        """Whether no experiment found a problem; hints do not count."""
        return all(each.state != "problem" for each in self.experiments)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return "\n".join(f"{e.state:<8} {e.name:<13} {e.message}" for e in self.experiments)


@checked
def check(
    model: Any,
    optimizer: Any,
    step_fn: Callable[[Any], Any],
    batch: Any,
    *others: Any,
    steps: int = 20,
    loader: Any = None,
    experiments: Sequence[str] = EXPERIMENTS,
) -> ModelCheck:
    """Make experiments with a model on one batch, and put everything back as it was.

    ``step_fn(batch)`` is a training step that returns its loss. The experiments: does the loss
    before training match its theory, does the output for a row depend on other rows, is it random
    in evaluation, does the model learn one batch in `steps` steps, and do the workers of a `loader`
    draw different random numbers. `others` are a scheduler, a GradScaler, and whatever else a step
    changes.

    >>> import torch
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def step_fn(batch):
    ...     optimizer.zero_grad()
    ...     loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss
    >>> bool(check(model, optimizer, step_fn, (torch.eye(4), torch.ones(4, 1))))
    True
    """
    check_callable("step_fn", step_fn)
    check_count("steps", steps, 4)
    for name in experiments:
        if name not in EXPERIMENTS:
            known = ", ".join(EXPERIMENTS)
            raise ValueError(f"experiments has no {name!r:.80}; choose from {known}")
    made, training = _prepared(model, optimizer, others)
    kept = training.keep_batch(batch)
    with rewound(training), made.same_structure(optimizer):
        found = list(_experiments(made, training, step_fn, kept, steps, loader))
    return ModelCheck(tuple(each for each in found if each.name in experiments))


def _prepared(
    model: Any, optimizer: Any, others: tuple[Any, ...]
) -> tuple[ModelExperiments, Training]:
    for framework in loaded_frameworks():
        made = framework.experiments(model)
        training = framework.training(model, optimizer, others) if made is not None else None
        if made is not None and training is not None:
            return made, training
    raise TypeError(f"model must be a torch.nn.Module, got {model!r:.100}")


def _experiments(
    made: ModelExperiments,
    training: Training,
    step_fn: Callable[[Any], Any],
    kept: KeptBatch,
    steps: int,
    loader: Any,
) -> Iterator[Experiment]:
    with made.watching():
        losses = [_loss_of(step_fn(training.batch_of(kept)))]
    yield _initial_loss(made.losses())
    yield _rows(made)
    yield _evaluation(made.is_random())
    losses += [_loss_of(step_fn(training.batch_of(kept))) for _ in range(steps - 1)]
    yield _overfit(losses)
    if loader is not None:
        yield _workers(made.workers_alike(loader))


def _loss_of(result: Any) -> float:
    """Return the loss that a step returned, alone or first in a tuple or dict; else NaN."""
    if isinstance(result, dict):
        result = result.get("loss", next(iter(result.values()), None))
    elif isinstance(result, (tuple, list)) and result:
        result = result[0]
    result = getattr(result, "loss", result)
    try:
        return float(result.detach() if hasattr(result, "detach") else result)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"step_fn must return the loss as one number, got {result!r:.80}") from None


def _initial_loss(found: list[LossFact]) -> Experiment:
    name = "initial_loss"
    for loss in found:
        limit = _TIMES_TARGETS * loss.expected if loss.is_relative else (
            loss.expected + _ABOVE_CHANCE
        )  # fmt: skip
        chance = f"{loss.function} is {loss.value:.4g}; a model that knows nothing has "
        chance += f"{loss.expected:.4g}"
        if not loss.value <= limit and loss.expected > 0:
            what = "scale targets, or initialize the last layer smaller"
            if not loss.is_relative:
                what = "logits are too large, or a softmax or a mean is missing: check the loss"
            return Experiment(name, "problem", f"{chance}; {what}")
        if not loss.is_relative and loss.value < 0.5 * loss.expected:
            message = f"{chance}; fine if it is trained already, else targets are in the input"
            return Experiment(name, "hint", message)
    if not found:
        return Experiment(name, "unknown", "the step calls no loss function of torch that is known")
    return Experiment(name, "fine", chance)


def _overfit(losses: list[float]) -> Experiment:
    name, first, last = "overfit", losses[0], min(losses[-max(1, len(losses) // 4) :])
    course = f"the loss goes from {first:.4g} to {last:.4g} in {len(losses)} steps on one batch"
    if not all(map(math.isfinite, losses)):
        return Experiment(name, "problem", "the loss is NaN or Inf after a few steps on one batch")
    if all(loss == first for loss in losses):
        message = f"the loss stays {first:.4g}: does the optimizer have the model's parameters?"
        return Experiment(name, "problem", message)
    if last >= first:
        message = f"{course}: check the learning rate, the sign of the loss, and the targets"
        return Experiment(name, "problem", message)
    if first - last < _LITTLE * abs(first):
        return Experiment(name, "hint", f"{course}: the learning rate may be too small")
    return Experiment(name, "fine", course)


def _rows(made: ModelExperiments) -> Experiment:
    name, dependence = "rows", made.dependence()
    if dependence == "others":
        message = (
            "the output for a row changes with another row: is a reshape, mean or softmax over "
            "the dimension of the batch?"
        )
        return Experiment(name, "problem", message)
    if dependence == "none":
        return Experiment(name, "problem", "the output does not depend on the input")
    if dependence == "own":
        return Experiment(name, "fine", "the output for a row depends on that row alone")
    why = "is random" if dependence == "random" else "has no row for each row of the batch"
    return Experiment(name, "unknown", f"the output {why}, so it cannot be told")


def _evaluation(is_random: bool | None) -> Experiment:
    return _answer(
        "evaluation",
        is_random,
        "hint",
        "the output is random in eval() mode, which is fine if the model samples; functions such "
        "as dropout(x) need training=self.training",
        fine="the output is not random in eval() mode",
        unknown="the model has no output with a row for each sample",
    )


def _workers(alike: bool | None) -> Experiment:
    return _answer(
        "workers",
        alike,
        "problem",
        "all workers of the loader draw the same random numbers: seed the dataset's generator in "
        "worker_init_fn",
        fine="workers of the loader draw different random numbers",
        unknown="the loader has fewer than 2 workers, or is not random",
    )


def _answer(
    name: str,
    found: bool | None,
    state: Literal["hint", "problem"],
    message: str,
    *,
    fine: str,
    unknown: str,
) -> Experiment:
    """Return the result of an experiment that finds one thing, or not, or cannot tell."""
    if found is None:
        return Experiment(name, "unknown", unknown)
    return Experiment(name, state, message) if found else Experiment(name, "fine", fine)
