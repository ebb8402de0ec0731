"""Figures of a run, a live session, a tracker or a LogFrame.

    from tensortap import viz

    viz.scalar_line(run, tt="Activation", layer="output", scalar_metric=["rm2", "min_abs"])

See the help of each function, for example ``help(viz.exp_hist)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core.rooms import lazy

if TYPE_CHECKING:
    from tensortap.api.lookup import summarize
    from tensortap.rooms.figures.explorer import interactive
    from tensortap.rooms.figures.plots import (
        exp_hist,
        report,
        save,
        scalar_global_heatmap,
        scalar_line,
        tensor,
        training,
    )
    from tensortap.rooms.logframe.read import read_logframe, validate_logframe

__all__ = [
    "exp_hist",
    "interactive",
    "read_logframe",
    "report",
    "save",
    "scalar_global_heatmap",
    "scalar_line",
    "summarize",
    "tensor",
    "training",
    "validate_logframe",
]
__getattr__ = lazy(
    __name__,
    {
        "exp_hist": "tensortap.rooms.figures.plots:exp_hist",
        "interactive": "tensortap.rooms.figures.explorer:interactive",
        "read_logframe": "tensortap.rooms.logframe.read:read_logframe",
        "report": "tensortap.rooms.figures.plots:report",
        "save": "tensortap.rooms.figures.plots:save",
        "scalar_global_heatmap": "tensortap.rooms.figures.plots:scalar_global_heatmap",
        "scalar_line": "tensortap.rooms.figures.plots:scalar_line",
        "summarize": "tensortap.api.lookup:summarize",
        "tensor": "tensortap.rooms.figures.plots:tensor",
        "training": "tensortap.rooms.figures.plots:training",
        "validate_logframe": "tensortap.rooms.logframe.read:validate_logframe",
    },
)
