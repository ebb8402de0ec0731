"""Alerts: rules that check every record and report each problem once.

    monitor = AlertMonitor([nan(), exploding(factor=30)], on_alert="stop")
    monitor.see(record)      # for every record, in the order of capture
    monitor.check()          # where training may be stopped

A rule is a function of a record and of the state it keeps for that tensor. It returns a message,
a `Finding`, or None.
"""

from __future__ import annotations

from tensortap.alerts.alert import Alert, Finding, alert_of, record_of
from tensortap.alerts.defaults import DEFAULT
from tensortap.alerts.model_rules import (
    changed_outside,
    never_changes,
    never_runs,
    not_registered,
    repeated_layer,
    untied,
    weight_decay,
)
from tensortap.alerts.monitor import AlertMonitor, RuleState, StepState
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
    not_shuffled,
    other_normalization,
    output_ignored,
    random_in_evaluation,
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
from tensortap.alerts.rules import (
    Rule,
    constant,
    dead,
    exploding,
    inf,
    loss_spike,
    nan,
    saturated,
    vanishing,
)
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

__all__ = [
    "Alert",
    "AlertMonitor",
    "DEFAULT",
    "Finding",
    "Rule",
    "RuleState",
    "StepState",
    "alert_of",
    "batch_norm_in_evaluation",
    "changed_outside",
    "clipping",
    "constant",
    "constant_input",
    "dead",
    "dropout_in_evaluation",
    "exploding",
    "frozen_changes",
    "gradient_discarded",
    "gradient_not_zeroed",
    "gradients_in_evaluation",
    "identical_workers",
    "inf",
    "initialization",
    "input_ignored",
    "input_scale",
    "labels",
    "learning_rate",
    "loss_gradient",
    "loss_spike",
    "nan",
    "never_changes",
    "never_runs",
    "no_autocast",
    "no_gradient",
    "no_optimizer",
    "not_divided",
    "not_normalized",
    "not_registered",
    "not_shuffled",
    "other_normalization",
    "output_ignored",
    "random_in_evaluation",
    "record_of",
    "repeated_layer",
    "same_batch",
    "saturated",
    "scale_falls",
    "scheduler_order",
    "scheduler_per_batch",
    "softmax_twice",
    "step_repeated",
    "training_in_eval",
    "untied",
    "vanishing",
    "weight_decay",
    "wide_layers",
]
