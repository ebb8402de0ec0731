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


def html_file(title: str, body: str, data: Any, *, scripts: Sequence[str], style: str = "") -> str:
    """Return the text of a page; its scripts find `data` in the element ``#data``.

    `title` is escaped here, `body` is markup. `style` is added to the style that all pages share.
    """
    parts = {
        "title": escape(title),
        "style": static_text("tensortap.viz", "page.css") + style,
        "body": body,
        "version": __version__,
        "data": script_json(data),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    # in one pass: the text of one part is never searched for the marker of another
    pieces = static_text("tensortap.viz", "page.html").split("/*|*/")
    return "".join(parts.get(piece, piece) for piece in pieces)


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


def static_text(package: str, name: str) -> str:
    """Return a file of the folder ``static`` of a package as text."""
    return (importlib.resources.files(package) / "static" / name).read_text(encoding="utf-8")


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
