"""The range of a number format, drawn over an axis of powers of two."""

from __future__ import annotations

import math
from typing import Any

from tensortap.stats.formats import Limits
from tensortap.viz.figures.encoding import text
from tensortap.viz.figures.theme import FigureTheme

# an axis of powers of two
POWERS = {
    "tickprefix": "2<sup>", "ticksuffix": "</sup>", "showgrid": False, "zeroline": False,
}  # fmt: skip


def range_shapes(target: Limits, x: str, y: str, colors: FigureTheme) -> list[dict[str, Any]]:
    """Return the normal and the subnormal range of a format as bands behind the bars."""
    top = math.log2(target.over)
    place = {"xref": x, "yref": f"{y} domain", "y0": 0, "y1": 1, "layer": "below"}
    bands = ((target.zero, target.normal, colors.fair), (target.normal, top, colors.good))
    ends = ((target.zero, "dot"), (target.normal, "dot"), (top, "solid"))
    return [
        {**place, "type": "rect", "x0": start, "x1": end, "fillcolor": color, "opacity": 0.12,
         "line": {"width": 0}}
        for start, end, color in bands if end > start
    ] + [
        {**place, "type": "line", "x0": at, "x1": at,
         "line": {"width": 1, "color": colors.dim, "dash": dash}}
        for at, dash in ends
    ]  # fmt: skip


def range_labels(
    target: Limits, x: str, y: str, colors: FigureTheme, width: int
) -> list[dict[str, Any]]:
    """Return the name of the format above its range, and ``subnormal`` where it has room."""
    label = {
        "xref": x, "yref": f"{y} domain", "y": 1, "yanchor": "top", "showarrow": False,
        "font": {"size": 10, "color": colors.dim},
    }  # fmt: skip
    middle = (target.normal + math.log2(target.over)) / 2
    words = [{**label, "x": middle, "text": text(target.dtype)}]
    if target.normal - target.zero > 0.08 * width:
        words.append({**label, "x": (target.zero + target.normal) / 2, "text": "subnormal"})
    return words
