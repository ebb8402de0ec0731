"""Self-contained HTML files: the one stack behind run reports and comparisons.

A file holds its style, its data as JSON, and its scripts. It loads nothing from a network, and
text that comes from a run can never become markup.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from tensortap._version import __version__
from tensortap.core.errors import MissingExtra
from tensortap.rooms.figures.figures.theme import Figure, dark_colors


class HtmlReport:
    """A page that is being written: `figures` maps element ids to the figures they show."""

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}

    def figure(self, figure: Figure, label: str) -> str:
        """Register a figure; return the element in which the page draws it."""
        key = f"figure{len(self.figures)}"
        self.figures[key] = figure
        height = int(figure["layout"].get("height", 300))
        return (
            f'<div class="figure" id="{key}" role="img" aria-label="{escape(label)}" '
            f'style="height:{height}px"></div>'
        )

    def page(self, title: str, body: str) -> str:
        """Return the text of the page; `title` is escaped here, `body` is markup."""
        try:
            from plotly.offline import get_plotlyjs
        except ImportError:
            raise MissingExtra.of("a report needs plotly", "view") from None
        scripts = (get_plotlyjs(), _static_text("report.js"))
        parts = {
            "title": escape(title),
            "style": _static_text("page.css"),
            "body": body,
            "version": __version__,
            "data": script_json({"figures": self.figures, "colors": dark_colors()}),
            "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
        }
        # in one pass: the text of one part is never searched for the marker of another
        pieces = _static_text("page.html").split("/*|*/")
        return "".join(parts.get(piece, piece) for piece in pieces)


def header(
    verdict: str, css: str, origin: Iterable[tuple[str, str]], counts: Iterable[tuple[str, int]]
) -> str:
    """Return the top of a page: the verdict, what it is about, and counts with their names."""
    lines = "".join(
        f'<span class="dim">{key}</span><span class="mono">{escape(text)}</span>'
        for key, text in origin
    )
    cards = "".join(f"<div><dt>{name}</dt><dd>{count:,}</dd></div>" for name, count in counts)
    return (
        f'<header><div id="verdict" class="{css}">{verdict}</div>'
        f'<div id="sides">{lines}</div><dl id="counts">{cards}</dl></header>'
    )


def section(title: str, content: str, note: str = "") -> str:
    """Return a section; `content` is markup, `note` is text."""
    words = f'<p class="dim">{escape(note)}</p>' if note else ""
    return f"<section><h2>{title}</h2>{words}{content}</section>"


def details(summary: str, content: str, at: str = "") -> str:
    """Return a part that unfolds; a click at the cell ``figure:[row,column]`` of `at` opens it."""
    place = f' data-at="{at}"' if at else ""
    return f"<details{place}><summary>{escape(summary)}</summary>{content}</details>"


def write_html_file(path: str | Path, page: str) -> Path:
    """Write a page atomically: a reader sees the old file or the new one, never a part."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _static_text(name: str) -> str:
    return (importlib.resources.files("tensortap.rooms.report") / "static" / name).read_text(
        "utf-8"
    )


def script_json(content: Any) -> str:
    """Return content as JSON that cannot end the ``<script>`` element around it.

    >>> script_json({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    data = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return data


def shortened(text: object, most: int) -> str:
    """Return at most so many characters of a text, without lone surrogates.

    >>> shortened("abcdef", 3), shortened("\\ud800", 3)
    ('abc…', '?')
    """
    words = str(text).encode("utf-8", "replace").decode("utf-8")
    return words if len(words) <= most else f"{words[:most]}…"


def escape(text: object, most: int = 1000) -> str:
    """Return a text as HTML that shows it letter by letter."""
    return html.escape(shortened(text, most))


def html_table(
    rows: Iterable[Sequence[object]], heads: Sequence[str] = (), *, numbers: Collection[int] = ()
) -> str:
    """Return a table of texts; the columns in `numbers` are aligned to the right.

    >>> html_table([["x", 1]], ["name", "count"], numbers=[1])[:60]
    '<div class="scroll"><table><thead><tr><th>name</th><th class'
    """
    right = [' class="n"' if column in numbers else "" for column in range(len(heads))]
    head = "".join(
        f"<th{align}>{escape(text)}</th>" for align, text in zip(right, heads, strict=True)
    )
    body = ""
    for row in rows:
        cells = (
            f'<td class="{"n" if column in numbers else "mono"}">{escape(text)}</td>'
            for column, text in enumerate(row)
        )
        body += f"<tr>{''.join(cells)}</tr>"
    top = f"<thead><tr>{head}</tr></thead>" if heads else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'
