"""Names, numbers and arrays in a figure dict, colors, and the template of all figures.

Lines have the colors of Okabe and Ito, which color-blind people can tell apart. NaN and Inf have
colors that no scale contains. Figures are drawn in light colors. Each of them has one dark color,
so that `themed` and the script of a report can replace them.
"""

from __future__ import annotations

import base64
import functools
import html
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.arguments import check_choice

AUTO = "auto"  # the value of a single number, the RMS of a tensor
Figure = dict[str, Any]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def text(words: str, most: int = 200) -> str:
    """Return words that plotly shows letter by letter: it takes some HTML for markup.

    >>> text("<b>layer</b> & co")
    '&lt;b&gt;layer&lt;/b&gt; &amp; co'
    """
    plain = _CONTROL.sub("�", words)
    if len(plain) > most:
        kept = (most - 1) // 2
        plain = f"{plain[:kept]}…{plain[-kept:]}"
    return html.escape(plain, quote=False)


def template_text(words: str) -> str:
    """Return words for a hover template, where ``%{…}`` would stand for a value.

    >>> "%{" in template_text("100%{x}")
    False
    """
    return text(words).replace("%{", "%\u200b{")


_STATISTICS = {
    "rm2": "RMS (rm2)", "rm4": "4th moment (rm4)", "rm8": "8th moment (rm8)",
    "max_abs": "largest |x| (max_abs)", "min_abs": "smallest |x| (min_abs)",
    "mean_abs": "mean |x| (mean_abs)", AUTO: "value or RMS",
}  # fmt: skip


def statistic_text(name: str) -> str:
    """Return the name of a statistic for people.

    >>> statistic_text("rm2"), statistic_text("std")
    ('RMS (rm2)', 'std')
    """
    return _STATISTICS.get(name, name)


def labels(names: Sequence[str], most: int = 44) -> list[str]:
    """Return short and distinct labels for an axis: the end of a name tells more than its start.

    >>> labels(["model.layers.0.attention"], 12)
    ['….attention']
    """
    seen: dict[str, int] = {}
    found = []
    for name in names:
        label = text(name if len(name) <= most else f"…{name[len(name) - most + 2 :]}")
        repeats = seen[label] = seen.get(label, -1) + 1
        found.append(label + "\u200b" * repeats)  # an invisible character makes it distinct
    return found


def some_names(names: Sequence[str]) -> str:
    """Return the first three names.

    >>> some_names("abcd"), some_names([])
    ('a, b, c …', 'anything')
    """
    return (", ".join(names[:3]) or "anything") + (" …" if len(names) > 3 else "")


def untyped(values: Any) -> NDArray[Any]:
    """Return the array that `typed` encoded."""
    if not isinstance(values, dict):
        return np.array([np.nan if value is None else value for value in values])
    found = np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
    shape = values.get("shape")
    return found.reshape([int(n) for n in str(shape).split(",")]) if shape else found


def with_arrays(figure: Figure) -> Figure:
    """Return the figure with NumPy arrays instead of base 64, for plotly's own classes."""
    traces = [
        {
            key: untyped(value) if isinstance(value, dict) and "bdata" in value else value
            for key, value in trace.items()
        }
        for trace in figure["data"]
    ]
    return {**figure, "data": traces}


def share(part: float) -> str:
    """Return a share in percent; only nothing is 0 %, and only everything is 100 %.

    >>> share(0.123), share(0.0), share(1e-9), share(0.999999), share(1.0)
    ('12.3 %', '0 %', '<0.001 %', '>99.999 %', '100 %')
    """
    if part != part:
        return "–"
    percent = part * 100
    if percent in (0.0, 100.0):
        return f"{percent:.0f} %"
    if percent < 0.001:
        return "<0.001 %"
    if percent > 99.999:
        return ">99.999 %"
    return f"{percent:.3g} %" if percent < 99 else f"{percent:.5g} %"


_FONT = (
    'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", Arial, sans-serif'
)
_CLEAR = "rgba(0,0,0,0)"
_SPAN = re.compile(r'(?<=<span style="color:)#[0-9a-f]{6}')
LEGEND_RIGHT = {"x": 1, "xanchor": "right"}


class FigureColors(NamedTuple):
    """The colors of a theme."""

    page: str
    ink: str
    dim: str
    grid: str
    line: str
    hover: str
    lines: tuple[str, ...]
    good: str  # representable in a format
    fair: str  # representable with fewer digits
    bad: str  # lost
    nan: str
    posinf: str
    neginf: str
    inf: str
    alert: str
    marked: str  # the chosen step
    size: tuple[str, ...]  # a scale from small to large
    sign: tuple[str, ...]  # a scale from negative to positive


COLORS = FigureColors(
    page="#ffffff", ink="#1b1f27", dim="#667085", grid="#eceff4", line="#c9cfd9",
    hover="#fefefe",
    lines=("#0072b2", "#d55e00", "#009e73", "#b8548f", "#c98500", "#3ba3dd", "#7a5fc4", "#6b7280"),
    good="#3b7fc4", fair="#e0a22e", bad="#d1495b",
    nan="#e6007e", posinf="#ffc400", neginf="#00b8a0", inf="#ff6d00", alert="#f59f00",
    marked="#1b1f27",
    size=("#eef3d2", "#c9e6c0", "#86cdbb", "#46abc1", "#2577b0", "#244a9b", "#141f57"),
    sign=("#08407e", "#3f8ac2", "#a6cde3", "#f7f8fa", "#fbc98e", "#e0802b", "#8c3a04"),
)  # fmt: skip
DARK = FigureColors(
    page="#171b22", ink="#e6e9ef", dim="#98a2b3", grid="#262c36", line="#3b4351",
    hover="#232935",
    lines=("#5cb3f5", "#ff9352", "#3fd0a0", "#f29ac6", "#ffc44f", "#8fd8ff", "#b9a0f0", "#b4bac5"),
    good="#5b9fe3", fair="#e8b34b", bad="#f0697a",
    nan="#ff3da5", posinf="#ffd633", neginf="#2ee6cc", inf="#ff8a3d", alert="#ffc53d",
    marked="#e6e9ef",
    size=("#1d2a3d", "#1f426f", "#1f6699", "#2b93ad", "#63bfae", "#b3deac", "#f3f4c8"),
    sign=("#a9dbff", "#4f9fe0", "#245a8c", "#232831", "#8a4d17", "#e08a3a", "#ffd9a8"),
)  # fmt: skip


@functools.cache
def dark_colors() -> dict[str, str]:
    pairs: dict[str, str] = {}
    for light, dark in zip(COLORS, DARK, strict=True):
        ones, others = ((c,) if isinstance(c, str) else c for c in (light, dark))
        pairs.update(zip(ones, others, strict=True))
    return pairs


def themed(figure: Figure, theme: str) -> Figure:
    """Return a figure in the colors of a theme, ``"light"`` or ``"dark"``."""
    check_choice("theme", theme, ("light", "dark"))
    if theme == "light":
        return figure
    return {**figure, **{key: _darkened(figure[key], key) for key in ("data", "layout")}}


def _darkened(part: Any, key: str) -> Any:
    """Return a part of a figure in dark colors: only colors are replaced, never names."""
    if isinstance(part, dict):
        return {own: _darkened(each, own) for own, each in part.items()}
    if isinstance(part, list):
        return [_darkened(each, key) for each in part]
    if not isinstance(part, str):
        return part
    if "color" in key or key in ("sequential", "diverging"):
        return dark_colors().get(part, part)
    # names are escaped, so a "<" is always markup of tensortap itself
    return _SPAN.sub(lambda found: dark_colors()[found[0]], part) if key == "text" else part


def scale(colors: Sequence[str]) -> list[list[Any]]:
    return [[i / (len(colors) - 1), color] for i, color in enumerate(colors)]


@functools.cache
def _template() -> Figure:
    small = {"size": 11, "color": COLORS.dim}
    font = {"family": _FONT, "size": 12, "color": COLORS.ink}
    axis = {
        "gridcolor": COLORS.grid, "linecolor": COLORS.line, "tickcolor": COLORS.line,
        "zerolinecolor": COLORS.line, "zerolinewidth": 1, "ticks": "outside", "ticklen": 4,
        "tickfont": small, "title": {"font": {"size": 12, "color": COLORS.dim}, "standoff": 8},
        "automargin": True, "spikecolor": COLORS.dim, "spikethickness": 1, "spikedash": "solid",
    }  # fmt: skip
    return {
        "layout": {
            "paper_bgcolor": COLORS.page, "plot_bgcolor": COLORS.page, "font": font,
            "margin": {"l": 52, "r": 16, "t": 44, "b": 44}, "colorway": list(COLORS.lines),
            "title": {
                "font": {"size": 14, "color": COLORS.ink}, "x": 0, "xref": "paper",
                "xanchor": "left", "pad": {"b": 8},
            },
            "xaxis": axis, "yaxis": axis,
            "hoverlabel": {
                "bgcolor": COLORS.hover, "bordercolor": COLORS.line, "font": font,
                "align": "left", "namelength": -1,
            },
            "legend": {
                "orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom",
                "bgcolor": _CLEAR, "font": small, "itemsizing": "constant",
            },
            "modebar": {"bgcolor": _CLEAR, "color": COLORS.line, "activecolor": COLORS.ink},
            "colorscale": {"sequential": scale(COLORS.size), "diverging": scale(COLORS.sign)},
        },
        "data": {"heatmap": [{
            "type": "heatmap",
            "colorbar": {"outlinewidth": 0, "ticks": "", "thickness": 10, "tickfont": small},
        }]},
    }  # fmt: skip


def layout(**more: Any) -> Figure:
    return {"template": _template(), "autosize": True, **more}


def note(words: str, x: float, y: float, size: int, color: str, **more: Any) -> dict[str, Any]:
    """Return an annotation at a position of the figure; `words` is markup."""
    return {
        "text": words, "x": x, "y": y, "xref": "paper", "yref": "paper", "showarrow": False,
        "font": {"size": size, "color": color}, **more,
    }  # fmt: skip


def colored(words: str, color: str) -> str:
    return f'<span style="color:{color}">{words}</span>'


def message_figure(words: str, height: int = 220) -> Figure:
    """Return a sentence in place of a figure."""
    hidden = {"visible": False, "fixedrange": True}
    message = note(text(words, 400), 0.5, 0.5, 14, COLORS.dim)
    made = layout(height=height, annotations=[message], xaxis=hidden, yaxis=hidden)
    return {"data": [], "layout": {**made, "shapes": [], "meta": {"empty": True}}}
