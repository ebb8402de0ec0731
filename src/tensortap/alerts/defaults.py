"""The rules of ``alerts=True``."""

from __future__ import annotations

from tensortap.alerts.rules import RECORD_RULES, Rule
from tensortap.alerts.steps import STEP_RULES

DEFAULT: tuple[Rule, ...] = (*RECORD_RULES, *STEP_RULES)
