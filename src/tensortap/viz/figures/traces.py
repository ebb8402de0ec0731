"""Traces that several figures are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.viz.figures.decimate import decimate
from tensortap.viz.figures.encoding import typed
from tensortap.viz.figures.tiles import lonely_cells

_TINY = 100  # cells along a side from which a cell may be smaller than a pixel


def line_trace(
    x: NDArray[Any], y: NDArray[np.float64], pixels: int, line: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Return a line over rising `x`, thinned to what so many pixels can show; NaN is a gap."""
    kept = decimate(x, y, pixels)
    return {
        "type": "scatter", "mode": "lines+markers" if len(kept) <= 40 else "lines",
        "x": typed(x[kept]), "y": typed(y[kept]), "line": line, "marker": {"size": 4}, **more,
    }  # fmt: skip


def marks_trace(
    x: Any, y: Any, color: str, *, symbol: str = "x", size: int = 8, edge: str = "", **more: Any
) -> dict[str, Any]:
    """Return single marks; `edge` is the color of a thin line around each."""
    marker: dict[str, Any] = {"symbol": symbol, "size": size, "color": color}
    if edge:
        marker["line"] = {"width": 1, "color": edge}
    x, y = (typed(each) if isinstance(each, np.ndarray) else each for each in (x, y))
    return {"type": "scatter", "mode": "markers", "x": x, "y": y, "marker": marker, **more}


def flat_trace(mask: NDArray[np.bool_], x: Any, y: Any, color: str, **more: Any) -> dict[str, Any]:
    """Return a heatmap that paints the cells of a mask in one color."""
    return {
        "type": "heatmap", "x": x, "y": y, "z": typed(np.where(mask, 1, np.nan).astype("f4")),
        "zmin": 0, "zmax": 1, "colorscale": [[0, color], [1, color]], "showscale": False,
        "hoverongaps": False, **more,
    }  # fmt: skip


def flagged_cells(
    mask: NDArray[np.bool_],
    x: NDArray[Any],
    y: NDArray[Any] | list[str],
    color: str,
    legend: str,
    edge: str,
    **flat: Any,
) -> list[dict[str, Any]]:
    """Return traces that paint cells in a color which the scale lacks, with a legend entry.

    A cell may be smaller than a pixel: lonely ones in a large heatmap also get a mark.
    """
    none = np.empty(0, np.intp)
    rows, columns = lonely_cells(mask) if max(mask.shape) > _TINY else (none, none)
    positions, encoded = (y, y) if isinstance(y, list) else (y.tolist(), typed(y))
    key = marks_trace(
        x[columns].tolist() or [None], [positions[i] for i in rows] or positions[:1], color,
        symbol="square", size=6, edge=edge, name=legend, hoverinfo="skip",
    )  # fmt: skip
    return [flat_trace(mask, typed(x), encoded, color, **flat), key]
