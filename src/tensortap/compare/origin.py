"""Find the module that a difference comes from."""

from __future__ import annotations

from typing import Any

from tensortap.compare.report import Difference
from tensortap.record import Kind

_OF_PARAMETERS = {Kind.WEIGHT.value, Kind.WEIGHT_GRADIENT.value, Kind.OPTIMISER_STATE.value}


def culprit_of(differences: list[Difference], plan: Any) -> str:
    """Return a sentence on the origin of the first difference; empty if there is none.

    Records are in the order of execution: if the first that differs is the output of a module,
    everything that it was computed from agrees.
    """
    first = next((d for d in differences if not d.expected), None)
    if first is None:
        return ""
    key = first.key
    if key.kind == Kind.ACTIVATION.value:
        before = [
            item
            for item in plan.items
            if (item.key.step, item.seq) < (key.step, plan.order(first)[1])
            and item.key.kind == key.kind
        ]
        seen = plan.equal or before
        inside = f"{key.name}: everything before it agrees, its output does not"
        return f"culprit: {inside}" if seen else f"{key.name} is the first recorded output"
    if key.kind == Kind.GRADIENT.value:
        return f"culprit: the backward pass behind {key.name}; all outputs agree until then"
    if key.kind in _OF_PARAMETERS:
        return f"culprit: {key.name} ({key.kind}) differs before any output does"
    return ""
