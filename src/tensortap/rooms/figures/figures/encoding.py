"""Names, numbers and arrays in a figure dict."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
