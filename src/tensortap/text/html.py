"""Tables as HTML, for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> str:
    """Return a table of texts.

    >>> html_table([["<x>"]])
    '<table><tr><td style="text-align:left">&lt;x&gt;</td></tr></table>'
    """

    def line(tag: str, cells: Sequence[object]) -> str:
        shown = (html.escape(str(cell)[:1000]) for cell in cells)
        return "".join(f'<{tag} style="text-align:left">{cell}</{tag}>' for cell in shown)

    all_lines = [line("th", heads)] * bool(heads) + [line("td", row) for row in rows]
    return f"<table>{''.join(f'<tr>{each}</tr>' for each in all_lines)}</table>"
