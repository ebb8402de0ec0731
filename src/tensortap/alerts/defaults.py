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
    no_optimizer(), no_gradient(), frozen_changes(), gradient_discarded(), gradient_not_zeroed(),
    step_repeated(), learning_rate(), training_in_eval(), dropout_in_evaluation(), initialization(),
    never_changes(), changed_outside(), never_runs(), not_registered(), untied(), weight_decay(),
)  # fmt: skip
DEFAULT: tuple[Rule, ...] = (*RECORD_RULES, *STEP_RULES)
