"""How figures look: colours, fonts, and what goes into a figure dict.

The colours of lines are those of Okabe and Ito, which people see apart whatever their eyes; what
is not finite has colours that no scale contains.
"""

from __future__ import annotations

import base64
import functools
import html
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Figure = dict[str, Any]

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", Arial, sans-serif'
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace'


class Theme(NamedTuple):
    """The colours of one look."""

    page: str
    ink: str
    dim: str
    grid: str
    line: str
    hover: str
    lines: tuple[str, ...]
    good: str  # kept by a format
    fair: str  # kept with fewer digits
    bad: str  # lost
    nan: str
    posinf: str
    neginf: str
    inf: str
    alert: str
    marked: str  # the chosen step
    size: tuple[str, ...]  # a scale from small to large
    sign: tuple[str, ...]  # a scale from negative to positive


LIGHT = Theme(
    page="#ffffff", ink="#1b1f27", dim="#667085", grid="#eceff4", line="#c9cfd9",
    hover="#fefefe",
    lines=("#0072b2", "#d55e00", "#009e73", "#b8548f", "#c98500", "#3ba3dd", "#7a5fc4", "#6b7280"),
    good="#3b7fc4", fair="#e0a22e", bad="#d1495b",
    nan="#e6007e", posinf="#ffc400", neginf="#00b8a0", inf="#ff6d00", alert="#f59f00",
    marked="#1b1f27",
    size=("#eef3d2", "#c9e6c0", "#86cdbb", "#46abc1", "#2577b0", "#244a9b", "#141f57"),
    sign=("#08407e", "#3f8ac2", "#a6cde3", "#f7f8fa", "#fbc98e", "#e0802b", "#8c3a04"),
)  # fmt: skip
DARK = Theme(
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


def theme_of(name: str) -> Theme:
    """The look of a name: ``light`` or ``dark``."""
    try:
        return _THEMES[name]
    except KeyError:
        raise ValueError(f"a theme is 'light' or 'dark', not {name!r}") from None


def scale(colours: Sequence[str]) -> list[list[Any]]:
    """Colours as a plotly scale, evenly spaced."""
    last = len(colours) - 1
    return [[i / last, colour] for i, colour in enumerate(colours)]


@functools.lru_cache(4)
def template(name: str) -> Figure:
    """The plotly template of a look."""
    theme = theme_of(name)
    axis = {
        "gridcolor": theme.grid,
        "gridwidth": 1,
        "linecolor": theme.line,
        "zerolinecolor": theme.line,
        "zerolinewidth": 1,
        "tickcolor": theme.line,
        "ticks": "outside",
        "ticklen": 4,
        "tickfont": {"size": 11, "color": theme.dim},
        "title": {"font": {"size": 12, "color": theme.dim}, "standoff": 8},
        "automargin": True,
        "spikecolor": theme.dim,
        "spikethickness": 1,
        "spikedash": "solid",
    }
    bar = {
        "outlinewidth": 0,
        "ticks": "",
        "thickness": 10,
        "tickfont": {"size": 11, "color": theme.dim},
    }
    return {
        "layout": {
            "paper_bgcolor": theme.page,
            "plot_bgcolor": theme.page,
            "font": {"family": FONT, "size": 12, "color": theme.ink},
            "title": {
                "font": {"size": 14, "color": theme.ink},
                "x": 0,
                "xref": "paper",
                "xanchor": "left",
                "pad": {"b": 8},
            },
            "colorway": list(theme.lines),
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {
                "bgcolor": theme.hover,
                "bordercolor": theme.line,
                "font": {"family": FONT, "size": 12, "color": theme.ink},
                "align": "left",
                "namelength": -1,
            },
            "legend": {
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 1,
                "yanchor": "bottom",
                "bgcolor": "rgba(0,0,0,0)",
                "font": {"size": 11, "color": theme.dim},
                "itemsizing": "constant",
            },
            "modebar": {
                "bgcolor": "rgba(0,0,0,0)",
                "color": theme.line,
                "activecolor": theme.ink,
            },
            "colorscale": {"sequential": scale(theme.size), "diverging": scale(theme.sign)},
        },
        "data": {"heatmap": [{"type": "heatmap", "colorbar": bar}]},
    }


def layout(look: str, **more: Any) -> Figure:
    """The layout of a figure in a look."""
    return {"template": template(look), "autosize": True, **more}


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def text(words: str, most: int = 200) -> str:
    """Words as plotly shows them, letter by letter: it takes some HTML for markup.

    >>> text("<b>layer</b> & co")
    '&lt;b&gt;layer&lt;/b&gt; &amp; co'
    """
    plain = _CONTROL.sub("�", words)
    if len(plain) > most:
        kept = (most - 1) // 2
        plain = f"{plain[:kept]}…{plain[-kept:]}"
    return html.escape(plain, quote=False)


def template_text(words: str, most: int = 200) -> str:
    """Words for a template of hover texts, in which ``%{…}`` stands for a value.

    >>> "%{" in template_text("100%{x}")
    False
    """
    return text(words, most).replace("%{", "%\u200b{")


def labels(names: Sequence[str], most: int = 44) -> list[str]:
    """Names to stand on an axis: short, and no two alike."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        label = text(name, most)
        again = seen.get(label, 0)
        seen[label] = again + 1
        found.append(label + "\u200b" * again)  # shows nothing, and is another text
    return found


_FEW = 8
_CODES = {"f": "f", "i": "i", "u": "u"}


def typed(values: NDArray[Any]) -> Any:
    """An array for a figure: as bytes in base 64, a small one as a list."""
    values = np.asarray(values)
    if values.dtype == np.int64:
        fits = not values.size or (values.min() >= -(2**31) and values.max() < 2**31)
        values = values.astype(np.int32 if fits else np.float64)
    if values.size <= 16 and values.ndim == 1:
        return [None if value != value else value for value in values.tolist()]
    whole = np.ascontiguousarray(values)
    code = f"{_CODES[whole.dtype.kind]}{whole.dtype.itemsize}"
    found = {"dtype": code, "bdata": base64.b64encode(whole.tobytes()).decode()}
    if whole.ndim > 1:
        found["shape"] = ", ".join(map(str, whole.shape))
    return found


def untyped(values: Any) -> NDArray[Any]:
    """The array that `typed` has put into a figure."""
    if not isinstance(values, dict):
        return np.array([np.nan if value is None else value for value in values])
    found = np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
    shape = values.get("shape")
    return found.reshape([int(n) for n in str(shape).split(",")]) if shape else found


def with_arrays(figure: Figure) -> Figure:
    """The same figure with NumPy arrays where it has bytes: for plotly's own classes."""
    traces = [
        {
            key: untyped(value) if isinstance(value, dict) and "bdata" in value else value
            for key, value in trace.items()
        }
        for trace in figure["data"]
    ]
    return {**figure, "data": traces}


def message_figure(words: str, *, theme: str = "light", height: int = 220) -> Figure:
    """A sentence where a figure would be."""
    look = theme_of(theme)
    note = {
        "text": text(words, 400),
        "x": 0.5,
        "y": 0.5,
        "xref": "paper",
        "yref": "paper",
        "showarrow": False,
        "font": {"size": 14, "color": look.dim},
    }
    hidden = {"visible": False, "fixedrange": True}
    made = layout(theme, height=height, annotations=[note], xaxis=hidden, yaxis=hidden)
    return {"data": [], "layout": {**made, "shapes": [], "meta": {"empty": True}}}


def whole_ticks(size: float) -> dict[str, Any]:
    """For an axis of whole numbers: of few of them plotly would also name halves."""
    return {"dtick": 1} if size < _FEW else {}


def number(value: float, digits: int = 4) -> str:
    """A number as people read it.

    >>> number(0.25), number(12345678.0), number(3.0), number(float("nan"))
    ('0.25', '1.235e+07', '3', 'NaN')
    """
    if value != value:
        return "NaN"
    if value in (np.inf, -np.inf):
        return "Inf" if value > 0 else "−Inf"
    if float(value).is_integer() and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def share(part: float) -> str:
    """A share in percent: what is there at all is never 0 %, and less than all never 100 %.

    >>> share(0.123), share(0.0), share(1e-9), share(0.999999), share(1.0)
    ('12.3 %', '0 %', '<0.001 %', '>99.999 %', '100 %')
    """
    if part != part:
        return "–"
    if part in (0.0, 1.0):
        return f"{part * 100:.0f} %"
    percent = part * 100
    if percent < 0.001:
        return "<0.001 %"
    if percent > 99.999:
        return ">99.999 %"
    return f"{percent:.3g} %" if percent < 99 else f"{percent:.5g} %"
