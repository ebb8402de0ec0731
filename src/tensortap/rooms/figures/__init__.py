"""Figures of a run, a live session, a tracker or a LogFrame.

    from tensortap import viz

    viz.scalar_line(run, tt="Activation", layer="output", scalar_metric=["rm2", "min_abs"])

See the help of each function, for example ``help(viz.exp_hist)``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensortap.rooms.figures.interaction import interactive
    from tensortap.rooms.figures.plots import (
        exp_hist,
        save,
        scalar_global_heatmap,
        scalar_line,
        tensor,
        training,
    )
    from tensortap.rooms.figures.run_report import report

__all__ = [
    "exp_hist",
    "interactive",
    "report",
    "save",
    "scalar_global_heatmap",
    "scalar_line",
    "tensor",
    "training",
]
_MODULES = {"interactive": "interaction", "report": "run_report"}


def __getattr__(name: str) -> Any:
    # imported at first use, because a terminal needs no figures
    if name not in __all__:
        raise AttributeError(f"module 'tensortap.rooms.figures' has no attribute {name!r}")
    module = importlib.import_module(f"tensortap.rooms.figures.{_MODULES.get(name, 'plots')}")
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
