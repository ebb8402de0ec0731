"""The route for the health of a run: one row per rule, and small lines per layer."""

from __future__ import annotations

from typing import Any

from tensortap.core.record import Kind
from tensortap.page.responses import PageRequest, PageRoute
from tensortap.rooms.figures.routes import searched, table_and_rank
from tensortap.rooms.health.report import by_layer, health_of, layer_lines

_MAX_LINES = 600


def health(request: PageRequest) -> dict[str, Any]:
    """Return what each rule has found, worst first, and quantities of layers as SVG paths."""
    (table, rank), entry = table_and_rank(request), request.entry
    names = by_layer(table.layers(Kind.HEALTH.value))
    found = searched(request, names)
    found = names if found is None else found
    lines = layer_lines(table, found[:_MAX_LINES], rank)
    return {
        "rules": [
            row._asdict() for row in health_of(entry.table(), entry.reader(), entry.alerts())
        ],
        "layers": [
            {"layer": layer, "lines": [line._asdict() for line in own]}
            for layer, own in lines.items()
        ],
        "shown": min(len(found), _MAX_LINES),
        "found": len(found),
        "total": len(names),
    }


ROUTES = (PageRoute("health", health),)
