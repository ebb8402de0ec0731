"""The rules over training steps that ``alerts=True`` uses, and the functions that make them."""

from __future__ import annotations

from tensortap.rooms.health.model_rules import (
    MODEL_RULES,
    dropout_in_evaluation,
    gradients_in_evaluation,
    initialization,
    input_ignored,
    input_scale,
    no_autocast,
    not_normalized,
    not_registered,
    random_in_evaluation,
    repeated_layer,
    training_in_eval,
    untied,
    wide_layers,
)
from tensortap.rooms.health.steps import (
    OPTIMIZER_RULES,
    clipping,
    frozen_changes,
    gradient_discarded,
    gradient_not_zeroed,
    learning_rate,
    never_changes,
    no_gradient,
    no_optimizer,
    scheduler_per_batch,
    step_repeated,
)

__all__ = [
    "RULES",
    "clipping",
    "dropout_in_evaluation",
    "frozen_changes",
    "gradient_discarded",
    "gradient_not_zeroed",
    "gradients_in_evaluation",
    "initialization",
    "input_ignored",
    "input_scale",
    "learning_rate",
    "never_changes",
    "no_autocast",
    "no_gradient",
    "no_optimizer",
    "not_normalized",
    "not_registered",
    "random_in_evaluation",
    "repeated_layer",
    "scheduler_per_batch",
    "step_repeated",
    "training_in_eval",
    "untied",
    "wide_layers",
]

RULES = (*OPTIMIZER_RULES, *MODEL_RULES)
