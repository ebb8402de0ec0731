"""The route for the tab Align."""

from __future__ import annotations

from typing import Any

from tensortap.core.errors import TensortapError
from tensortap.page.catalog import RunEntry
from tensortap.page.responses import PageRequest, PageRoute
from tensortap.rooms.align.align import align
from tensortap.rooms.align.picture import alignment_figure
from tensortap.rooms.align.result import finding_lines
from tensortap.rooms.figures.figures.theme import themed


def aligned(request: PageRequest) -> dict[str, Any]:
    """Return what two runs have in common, token by token, and the figure."""
    entries = request.entries()
    if len(entries) != 2:
        raise TensortapError("name the run to align with: other=")
    found = align(*(e.path if isinstance(e, RunEntry) else e.reader() for e in entries))
    figure = themed(alignment_figure(found), request.theme)
    return {
        "verdict": found.verdict, "figure": figure, "lines": list(finding_lines(found)),
        "matched": found.matched, "tokens": [found.tokens_a, found.tokens_b],
    }  # fmt: skip


ROUTES = (PageRoute("align", aligned),)
