"""Training statistics: the curve from which people choose a step, and curves of a few pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.table.table import Table
from tensortap.viz.figures.decimate import decimate
from tensortap.viz.figures.panels import log_axis, step_line
from tensortap.viz.figures.theme import (
    Figure,
    layout,
    message_figure,
    text,
    theme_of,
    typed,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Curves = Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]

_CURVES = 4
_CLICKED = 5000
_WIDE = 50.0


def training_figure(
    source: Table | Curves,
    *,
    names: Sequence[str] | None = None,
    rank: int | None = None,
    ranks: int = 1,
    step: int | None = None,
    log: bool | None = None,
    width_px: int = 1000,
    height: int = 150,
    theme: str = "light",
) -> Figure:
    """The training statistics over steps, each on a scale of its own; `step` is marked.

    The first has the axis on the left, the second that on the right. `ranks` is of how many ranks
    given curves are the mean.
    """
    curves = source.metrics(rank) if isinstance(source, Table) else dict(source)
    if isinstance(source, Table) and rank is None:
        ranks = len(source.ranks())
    of = f" (mean of {ranks} ranks)" if ranks > 1 else ""
    if names is not None:
        curves = {name: curves[name] for name in names if name in curves}
    if not curves:
        words = "no training statistics: tracker.step(loss=loss) keeps them"
        return message_figure(words, theme=theme, height=height)
    look = theme_of(theme)
    shown = dict(list(curves.items())[:_CURVES])
    data: list[dict[str, Any]] = []
    made = layout(
        theme,
        height=height,
        margin={"l": 56, "r": 56 if len(shown) > 1 else 16, "t": 24, "b": 32},
        hovermode="x unified",
        hoverdistance=-1,  # a click anywhere is a click on the nearest step
        xaxis={"showspikes": True, "spikemode": "across", "spikesnap": "cursor", "title": None},
        legend={"y": 1, "font": {"size": 11, "color": look.ink}},
        showlegend=True,
        shapes=[] if step is None else [step_line(step, "x", look)],
        meta={"names": list(shown)},
    )
    for number, (name, (steps, values)) in enumerate(shown.items()):
        finite = np.isfinite(values)
        drawn = np.where(finite, values, np.nan)
        kept = decimate(steps, drawn, width_px)
        axis = "y" if not number else f"y{number + 1}"
        colour = look.lines[number]
        data.append({
            "type": "scatter", "mode": "lines+markers" if len(kept) <= 40 else "lines",
            "x": typed(steps[kept]), "y": typed(drawn[kept]), "name": text(name + of),
            "meta": {"name": name},
            "yaxis": axis, "line": {"color": colour, "width": 1.6}, "marker": {"size": 4},
            "connectgaps": False,
            # beside a gap, hovering finds the next value: then it says of which step that is
            "hovertemplate": "%{y:.5~g}" + ("" if finite.all() else " at %{x}"),
        })  # fmt: skip
        good = values[finite]
        if not finite.all():
            at = np.flatnonzero(~finite)[:1000]
            low = float(good.min()) if len(good) else 1.0
            data.append({
                "type": "scatter", "mode": "markers", "x": typed(steps[at]), "yaxis": axis,
                "y": typed(np.full(len(at), low)), "name": "not finite", "showlegend": False,
                "marker": {"symbol": "x", "size": 8, "color": look.nan},
                "hoverinfo": "skip",  # the nearest of them may be far
            })  # fmt: skip
        wide = bool(len(good)) and good.min() > 0 and good.max() > _WIDE * good.min()
        key = "yaxis" if not number else f"yaxis{number + 1}"
        made[key] = {
            "nticks": 4, "exponentformat": "power", "showgrid": not number,
            **(log_axis(good, 3) if (wide if log is None else log) else {}),
            **({"overlaying": "y", "side": "right"} if number else {}),
            **({"visible": False} if number > 1 else {}),
        }  # fmt: skip
    data.append(_steps(shown))
    made["yaxis9"] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    return {"data": data, "layout": made}


def _steps(curves: Curves) -> dict[str, Any]:
    """Every step, seen by nobody: what a click is on, also where a curve has a gap."""
    every = np.unique(np.concatenate([steps for steps, _ in curves.values()]))
    if len(every) > _CLICKED:
        every = every[np.linspace(0, len(every) - 1, _CLICKED).round().astype(np.int64)]
    return {
        "type": "scatter", "mode": "lines", "name": "step", "yaxis": "y9", "opacity": 0,
        "x": typed(every), "y": typed(np.full(len(every), 0.5)), "showlegend": False,
        "line": {"width": 0}, "hovertemplate": "step %{x:,}<extra></extra>",
    }  # fmt: skip


def sparkline(
    values: NDArray[Any], *, width: int = 96, height: int = 20, steps: NDArray[Any] | None = None
) -> str:
    """Values as the ``d`` of an SVG path of a few pixels; gaps where they are not finite.

    Of several at one step, of ranks or calls, that which is farthest from zero.

    >>> import numpy as np
    >>> sparkline(np.array([0.0, 1.0, np.nan, 1.0, 0.0]), width=8, height=4)
    'M0 3.5L2 0.5M6 0.5L8 3.5'
    >>> sparkline(np.array([0.0, 0.5, 0.0, 1.0]), width=8, height=4, steps=np.array([0, 0, 1, 1]))
    'M0 3.5L8 0.5'
    """
    values = np.asarray(values, np.float64)
    place = np.arange(len(values)) if steps is None else np.asarray(steps)
    values = np.where(np.isfinite(values), values, np.nan)
    starts = np.flatnonzero(np.diff(place, prepend=place[:1] - 1))
    if len(starts) < len(place):
        least, most = (each.reduceat(values, starts) for each in (np.fmin, np.fmax))
        place, values = place[starts], np.where(-least > most, least, most)
    good = values[~np.isnan(values)]
    if not len(good):
        return ""
    if len(good) > 1 and good.min() > 0 and good.max() > _WIDE * good.min():
        values, good = np.log10(values), np.log10(good)
    kept = decimate(place, values, width)
    x, y = place[kept].astype(np.float64), values[kept]
    low, high = float(good.min()), float(good.max())
    across = (x - x[0]) / ((x[-1] - x[0]) or 1.0) * width
    flat = high == low
    up = np.full_like(y, 0.5) if flat else (high - y) / (high - low)
    down = 0.5 + up * (height - 1)
    parts, pen = [], "M"
    for a, b, there in zip(across.tolist(), down.tolist(), (~np.isnan(y)).tolist(), strict=True):
        if there:
            parts.append(f"{pen}{a:.1f}".removesuffix(".0") + f" {b:.1f}".removesuffix(".0"))
        pen = "L" if there else "M"
    return "".join(parts)
