"""Every figure, defined once, as a plotly figure dict: ``{"data": [...], "layout": {...}}``.

The dicts are ready for JSON: the page sends them, notebooks wrap them, reports embed them.
"""

from __future__ import annotations

from tensortap.rooms.figures.figures.exponents import exponents_figure
from tensortap.rooms.figures.figures.heatmap import heatmap_figure
from tensortap.rooms.figures.figures.lines import lines_figure
from tensortap.rooms.figures.figures.tensors import histogram_figure, tensor_figure
from tensortap.rooms.figures.figures.training import sparkline, training_figure

__all__ = [
    "exponents_figure",
    "heatmap_figure",
    "histogram_figure",
    "lines_figure",
    "sparkline",
    "tensor_figure",
    "training_figure",
]
