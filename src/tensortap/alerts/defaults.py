"""The rules of ``alerts=True``."""

from __future__ import annotations

from tensortap.alerts.model_rules import (
    changed_outside,
    never_changes,
    never_runs,
    not_registered,
    untied,
    weight_decay,
)
from tensortap.alerts.pass_rules import (
    batch_norm_in_evaluation,
    constant_input,
    gradients_in_evaluation,
    identical_workers,
    input_ignored,
    input_scale,
    labels,
    loss_gradient,
    not_divided,
    not_normalized,
    output_ignored,
    same_batch,
    softmax_twice,
)
from tensortap.alerts.rate_rules import (
    clipping,
    no_autocast,
    scale_falls,
    scheduler_order,
    scheduler_per_batch,
    wide_layers,
)
from tensortap.alerts.rules import RECORD_RULES, Rule
from tensortap.alerts.steps import (
    dropout_in_evaluation,
    frozen_changes,
    gradient_discarded,
    gradient_not_zeroed,
    initialization,
    learning_rate,
    no_gradient,
    no_optimizer,
    step_repeated,
    training_in_eval,
)

STEP_RULES: tuple[Rule, ...] = (
    dropout_in_evaluation(), frozen_changes(), gradient_discarded(), gradient_not_zeroed(),
    initialization(), learning_rate(), no_gradient(), no_optimizer(), step_repeated(),
    training_in_eval(), changed_outside(), never_changes(), never_runs(), not_registered(),
    untied(), weight_decay(), batch_norm_in_evaluation(), constant_input(),
    gradients_in_evaluation(), identical_workers(), input_ignored(), input_scale(), labels(),
    loss_gradient(), not_divided(), not_normalized(), output_ignored(), same_batch(),
    softmax_twice(), clipping(), no_autocast(), scale_falls(), scheduler_order(),
    scheduler_per_batch(), wide_layers(),
)  # fmt: skip
DEFAULT: tuple[Rule, ...] = (*RECORD_RULES, *STEP_RULES)
