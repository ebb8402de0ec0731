"""The rules of ``alerts=True``."""

from __future__ import annotations

from tensortap.alerts.rules import RECORD_RULES, Rule
from tensortap.rooms.health.model_rules import MODEL_RULES
from tensortap.rooms.health.steps import OPTIMIZER_RULES

STEP_RULES: tuple[Rule, ...] = (*OPTIMIZER_RULES, *MODEL_RULES)
DEFAULT: tuple[Rule, ...] = (*RECORD_RULES, *STEP_RULES)
