"""Figures of a run, a live session, a tracker or a LogFrame.

    from tensortap import viz

    viz.scalar_line(run, tt="Activation", layer="output", scalar_metric=["rm2", "min_abs"])

What each of them does is said by its own words: ``help(viz.exp_hist)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensortap.viz.plots import (
        exp_hist,
        save,
        scalar_global_heatmap,
        scalar_line,
        tensor,
        training,
    )
    from tensortap.viz.run_report import report
    from tensortap.viz.widgets import interactive

# looked up when they are first used: a terminal needs no figures
_LATER = {
    "exp_hist": "tensortap.viz.plots",
    "interactive": "tensortap.viz.widgets",
    "report": "tensortap.viz.run_report",
    "save": "tensortap.viz.plots",
    "scalar_global_heatmap": "tensortap.viz.plots",
    "scalar_line": "tensortap.viz.plots",
    "tensor": "tensortap.viz.plots",
    "training": "tensortap.viz.plots",
}

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


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module 'tensortap.viz' has no attribute {name!r}")
    import importlib

    found = globals()[name] = getattr(importlib.import_module(module), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
