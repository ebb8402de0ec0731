"""An operand of an operation: a small histogram in which the bad elements are marked."""

from __future__ import annotations

import itertools
from typing import Any

from tensortap.alerts.explanation import OperandSummary
from tensortap.text.tensors import number, short_dtype
from tensortap.viz.figures.encoding import Figure, text
from tensortap.viz.figures.theme import layout, theme_of

_HEIGHT = 150
_MARGIN = 4  # bars: plotly hides a label that does not fit
_GAP, _WIDTH = 5, 3  # in bars: between the finite values and the others, and of one of these


def operand_figure(operand: OperandSummary, *, theme: str = "light") -> Figure:
    """Return the finite values in bars, marked ones in another color, then NaN and infinities.

    >>> x = OperandSummary("x", False, "float32", (3,), 3, nans=1, high=1.0, counts=(1, 1))
    >>> [trace["y"] for trace in operand_figure(x)["data"]]
    [[1, 1], [1]]
    """
    colors = theme_of(theme)
    bins = len(operand.counts)
    marked = [min(m, n) for m, n in zip(operand.marked, operand.counts, strict=False)]
    marked += [0] * (bins - len(marked))
    width = (operand.high - operand.low) / max(bins, 1)
    edges = [number(operand.low + i * width, 4) for i in range(bins)] + [number(operand.high, 4)]
    ranges = [f"{low} to {high}" for low, high in itertools.pairwise(edges)]
    plain = [n - m for n, m in zip(operand.counts, marked, strict=True)]
    data = [_bars(range(bins), plain, ranges, colors.good, "elements")] if bins else []
    if any(marked):
        words = "went into bad elements"
        data.append(_bars(range(bins), marked, ranges, colors.bad, words))
    ticks = {0: edges[0], bins - 1: edges[-1]} if bins else {}
    at = bins + _GAP
    for label, count, color in (
        ("NaN", operand.nans, colors.nan),
        ("+Inf", operand.posinfs, colors.posinf),
        ("−Inf", operand.neginfs, colors.neginf),
    ):
        if count:
            data.append(_bars([at], [count], [label], color, "elements", _WIDTH))
            ticks[at] = f"{count:,} {label}"
            at += _GAP + _WIDTH
    dim = f"[{', '.join(map(str, operand.shape))}] {short_dtype(operand.dtype)}"
    title = f'{text(operand.name, 40)}  <span style="color:{colors.dim};font-size:12px">'
    made = layout(
        theme,
        height=_HEIGHT,
        title={"text": f"{title}{text(dim)}{_note(sum(marked), bool(data))}</span>"},
        margin={"l": 40, "r": 8, "t": 30, "b": 26},
        barmode="stack",
        bargap=0,
        xaxis={
            "showgrid": False,
            "range": [-_MARGIN, max(ticks, default=0) + _MARGIN],
            "tickvals": list(ticks),
            "ticktext": list(ticks.values()),
            "tickangle": 0,
        },
        yaxis={"nticks": 4, "rangemode": "tozero"},
        showlegend=False,
    )
    return {"data": data, "layout": made}


def _note(marked: int, drawn: bool) -> str:
    if not drawn:
        return ", values not kept"
    return f", {marked:,} marked" if marked else ""


def _bars(
    x: Any, counts: list[int], labels: list[str], color: str, word: str, width: int = 1
) -> dict[str, Any]:
    return {
        "type": "bar", "x": list(x), "y": counts, "width": width, "customdata": labels,
        "marker": {"color": color, "line": {"width": 0}},
        "hovertemplate": f"%{{customdata}}<br>%{{y:,}} {word}<extra></extra>",
    }  # fmt: skip
