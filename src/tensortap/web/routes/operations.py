"""Why values stopped being finite, and the operations of modules."""

from __future__ import annotations

from typing import Any

import msgspec

from tensortap.alerts.alert import NO_VERDICT, verdict_of
from tensortap.errors import NotFound
from tensortap.viz.figures import operand_figure
from tensortap.web.responses import PageRequest


def why(request: PageRequest) -> dict[str, Any]:
    """Return the verdict of a step: its paragraph, its explanation, and the figures of operands."""
    verdict = verdict_of(request.entry.table().alerts(), request.integer("step"))
    if verdict is None:
        raise NotFound(NO_VERDICT)
    found = verdict.explanation
    operands = () if found is None else found.operands
    return {
        **msgspec.to_builtins(verdict),
        "figures": [operand_figure(each, theme=request.theme) for each in operands],
    }
