"""Tokens by layers, colored by difference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.page.encoding import typed
from tensortap.rooms.align.result import Alignment
from tensortap.rooms.figures.figures.theme import (
    COLORS,
    Figure,
    labels,
    layout,
    message_figure,
    scale,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TOKENS, _LAYERS = 400, 300  # largest number of columns and rows
_FLOOR = 1e-9  # what is smaller has the color of no difference


def alignment_figure(found: Alignment) -> Figure:
    """Return a heatmap: one row per layer, one column per token, sequence by sequence.

    Of tokens or layers that share a cell, the one that differs most is shown.
    """
    assert found.runs is not None
    shown = [each for each in found.names if each.rows]
    if not shown:
        return message_figure("no token is in both runs")
    table = found.runs[0].table
    # a context that several batches have is one column
    _, first, same = np.unique(table.identity, return_index=True, return_inverse=True)
    column_of = first[same]
    entries = np.unique(column_of[np.concatenate([each.entry_a for each in shown])])
    wide, tall = math.ceil(len(entries) / _TOKENS), math.ceil(len(shown) / _LAYERS)
    cells = np.full((math.ceil(len(shown) / tall), math.ceil(len(entries) / wide)), -1.0)
    for row, each in enumerate(shown):
        column = np.searchsorted(entries, column_of[each.entry_a]) // wide
        size = np.nan_to_num(np.abs(each.difference), nan=np.inf)
        np.maximum.at(cells[row // tall], column, size)
    firsts = entries[::wide]
    begins = np.flatnonzero(np.diff(table.place[firsts]) <= 0) + 0.5
    rows = labels([each.name for each in shown[::tall]])
    words = [f"token {table.token[e]} at {table.place[e]}" for e in firsts.tolist()]
    title = f"{found.verdict}: {found.matched:,} tokens"
    shared = {"height": max(260, 15 * len(rows) + 110), "title": {"text": title}}
    lines = [
        {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": COLORS.line, "width": 1}}
        for x in begins.tolist()
    ]  # fmt: skip
    return {
        "data": [_trace(cells, rows, words)],
        "layout": layout(
            **shared, shapes=lines if len(lines) < _TOKENS / 4 else [],
            margin={"l": 52, "r": 16, "t": 44, "b": 44},
            xaxis={"title": {"text": "tokens, sequence by sequence"}, "showgrid": False},
            yaxis={"autorange": "reversed", "showgrid": False, "type": "category"},
        ),
    }  # fmt: skip


def _trace(cells: NDArray[Any], rows: list[str], words: list[str]) -> dict[str, Any]:
    known = cells[cells > 0]
    high = math.log10(max(float(known[np.isfinite(known)].max(initial=_FLOOR)), 10 * _FLOOR))
    low = math.log10(_FLOOR)
    with np.errstate(divide="ignore"):
        z = np.log10(np.clip(cells, _FLOOR, 10.0**high))
    z[cells < 0] = np.nan
    ticks = list(range(math.ceil(low), math.floor(high) + 1, max(1, math.ceil((high - low) / 6))))
    names = [f"10<sup>{str(n).replace('-', '−')}</sup>" if n else "1" for n in ticks]
    return {
        "type": "heatmap", "z": typed(z.astype(np.float32)), "zmin": low, "zmax": high, "y": rows,
        "customdata": typed(np.where(cells < 0, np.nan, cells).astype(np.float32)),
        "colorscale": scale(COLORS.size), "text": [words] * len(rows),
        "hovertemplate": "%{y}<br>%{text}<br>difference %{customdata:.3~g}<extra></extra>",
        "colorbar": {
            "title": {"text": "difference", "side": "top"}, "tickvals": ticks, "ticktext": names,
            "len": 1, "y": 0.5,
        },
    }  # fmt: skip
