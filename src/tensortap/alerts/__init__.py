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
from tensortap.alerts.monitor import AlertMonitor, RuleState, StepState
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
from tensortap.rooms.health.model_rules import (
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
    "Alert",
    "AlertMonitor",
    "DEFAULT",
    "Finding",
    "Rule",
    "RuleState",
    "StepState",
    "alert_of",
    "clipping",
    "constant",
    "dead",
    "dropout_in_evaluation",
    "exploding",
    "frozen_changes",
    "gradient_discarded",
    "gradient_not_zeroed",
    "gradients_in_evaluation",
    "inf",
    "initialization",
    "input_ignored",
    "input_scale",
    "learning_rate",
    "loss_spike",
    "nan",
    "never_changes",
    "no_autocast",
    "no_gradient",
    "no_optimizer",
    "not_normalized",
    "not_registered",
    "random_in_evaluation",
    "record_of",
    "repeated_layer",
    "saturated",
    "scheduler_per_batch",
    "step_repeated",
    "training_in_eval",
    "untied",
    "vanishing",
    "wide_layers",
]
