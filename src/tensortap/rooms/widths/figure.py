"""The sizes of modules over the width of a model, for `tap.rooms.widths.coord_check`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tensortap.page.encoding import Figure, text
from tensortap.rooms.figures.figures.theme import layout, theme_of

_DASHES = {"output": "solid", "change": "dot"}


def widths_figure(sizes: Iterable[Any], step: int, theme: str = "light") -> Figure:
    """Return one line per module and quantity of a step, the mean over seeds, on log axes.

    A row of `sizes` has module, quantity, step, width and size.
    """
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in sizes:
        if row.step == step:
            lines = found.setdefault((row.module, row.quantity), {})
            lines.setdefault(row.width, []).append(row.size)
    if not found:
        raise ValueError(f"step must be one of the recorded steps, got {step}")
    colors = theme_of(theme).lines
    modules = list(dict.fromkeys(module for module, _ in found))
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": text(f"{module} ({quantity})"),
            "x": list(widths),
            "y": [float(np.mean(values)) for values in widths.values()],
            "line": {
                "color": colors[modules.index(module) % len(colors)],
                "dash": _DASHES[quantity],
            },
        }
        for (module, quantity), widths in found.items()
    ]
    made = layout(
        theme,
        height=420,
        xaxis={
            "type": "log",
            "title": f"width (step {step})",
            "tickvals": sorted({r.width for r in sizes}),
        },
        yaxis={"type": "log", "title": "mean |x|", "exponentformat": "power"},
        showlegend=True,
        legend={"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top"},
    )
    return {"data": data, "layout": made}
