"""The two color themes of figures, and what all figures share.

Lines have the colors of Okabe and Ito, which color-blind people can tell apart. NaN and Inf have
colors that no scale contains. Each light color has one dark color, so that a page can switch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensortap.page.encoding import Figure, text

_FONT = (
    'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", Arial, sans-serif'
)
_CLEAR = "rgba(0,0,0,0)"
LEGEND_RIGHT = {"x": 1, "xanchor": "right"}


class FigureTheme(NamedTuple):
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


LIGHT = FigureTheme(
    page="#ffffff", ink="#1b1f27", dim="#667085", grid="#eceff4", line="#c9cfd9",
    hover="#fefefe",
    lines=("#0072b2", "#d55e00", "#009e73", "#b8548f", "#c98500", "#3ba3dd", "#7a5fc4", "#6b7280"),
    good="#3b7fc4", fair="#e0a22e", bad="#d1495b",
    nan="#e6007e", posinf="#ffc400", neginf="#00b8a0", inf="#ff6d00", alert="#f59f00",
    marked="#1b1f27",
    size=("#eef3d2", "#c9e6c0", "#86cdbb", "#46abc1", "#2577b0", "#244a9b", "#141f57"),
    sign=("#08407e", "#3f8ac2", "#a6cde3", "#f7f8fa", "#fbc98e", "#e0802b", "#8c3a04"),
)  # fmt: skip
DARK = FigureTheme(
    page="#171b22", ink="#e6e9ef", dim="#98a2b3", grid="#262c36", line="#3b4351",
    hover="#232935",
    lines=("#5cb3f5", "#ff9352", "#3fd0a0", "#f29ac6", "#ffc44f", "#8fd8ff", "#b9a0f0", "#b4bac5"),
    good="#5b9fe3", fair="#e8b34b", bad="#f0697a",
    nan="#ff3da5", posinf="#ffd633", neginf="#2ee6cc", inf="#ff8a3d", alert="#ffc53d",
    marked="#e6e9ef",
    size=("#1d2a3d", "#1f426f", "#1f6699", "#2b93ad", "#63bfae", "#b3deac", "#f3f4c8"),
    sign=("#a9dbff", "#4f9fe0", "#245a8c", "#232831", "#8a4d17", "#e08a3a", "#ffd9a8"),
)  # fmt: skip
_THEMES = {"light": LIGHT, "dark": DARK}


def dark_colors() -> dict[str, str]:
    """Return the dark color for each light color: a page replaces them in dark mode."""
    pairs: dict[str, str] = {}
    for light, dark in zip(LIGHT, DARK, strict=True):
        ones, others = ((c,) if isinstance(c, str) else c for c in (light, dark))
        pairs.update(zip(ones, others, strict=True))
    return pairs


def theme_of(name: str) -> FigureTheme:
    """Return the theme ``light`` or ``dark``."""
    if name not in _THEMES:
        raise ValueError(f"theme must be 'light' or 'dark', got {name!r}")
    return _THEMES[name]


def scale(colors: Sequence[str]) -> list[list[Any]]:
    """Return colors as a plotly color scale, evenly spaced."""
    return [[i / (len(colors) - 1), color] for i, color in enumerate(colors)]


@functools.lru_cache(2)
def template(name: str) -> Figure:
    """Return the plotly template of a theme."""
    theme = theme_of(name)
    small = {"size": 11, "color": theme.dim}
    font = {"family": _FONT, "size": 12, "color": theme.ink}
    axis = {
        "gridcolor": theme.grid, "linecolor": theme.line, "tickcolor": theme.line,
        "zerolinecolor": theme.line, "zerolinewidth": 1, "ticks": "outside", "ticklen": 4,
        "tickfont": small, "title": {"font": {"size": 12, "color": theme.dim}, "standoff": 8},
        "automargin": True, "spikecolor": theme.dim, "spikethickness": 1, "spikedash": "solid",
    }  # fmt: skip
    return {
        "layout": {
            "paper_bgcolor": theme.page, "plot_bgcolor": theme.page, "font": font,
            "margin": {"l": 52, "r": 16, "t": 44, "b": 44}, "colorway": list(theme.lines),
            "title": {
                "font": {"size": 14, "color": theme.ink}, "x": 0, "xref": "paper",
                "xanchor": "left", "pad": {"b": 8},
            },
            "xaxis": axis, "yaxis": axis,
            "hoverlabel": {
                "bgcolor": theme.hover, "bordercolor": theme.line, "font": font, "align": "left",
                "namelength": -1,
            },
            "legend": {
                "orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom",
                "bgcolor": _CLEAR, "font": small, "itemsizing": "constant",
            },
            "modebar": {"bgcolor": _CLEAR, "color": theme.line, "activecolor": theme.ink},
            "colorscale": {"sequential": scale(theme.size), "diverging": scale(theme.sign)},
        },
        "data": {"heatmap": [{
            "type": "heatmap",
            "colorbar": {"outlinewidth": 0, "ticks": "", "thickness": 10, "tickfont": small},
        }]},
    }  # fmt: skip


def layout(theme: str, **more: Any) -> Figure:
    """Return the layout of a figure."""
    return {"template": template(theme), "autosize": True, **more}


def note(words: str, x: float, y: float, size: int, color: str, **more: Any) -> dict[str, Any]:
    """Return an annotation at a position of the figure; `words` is markup."""
    return {
        "text": words, "x": x, "y": y, "xref": "paper", "yref": "paper", "showarrow": False,
        "font": {"size": size, "color": color}, **more,
    }  # fmt: skip


def message_figure(words: str, *, theme: str = "light", height: int = 220) -> Figure:
    """Return a sentence in place of a figure."""
    hidden = {"visible": False, "fixedrange": True}
    message = note(text(words, 400), 0.5, 0.5, 14, theme_of(theme).dim)
    made = layout(theme, height=height, annotations=[message], xaxis=hidden, yaxis=hidden)
    return {"data": [], "layout": {**made, "shapes": [], "meta": {"empty": True}}}
