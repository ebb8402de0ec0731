"""The route for the tab Ranks."""

from __future__ import annotations

from typing import Any

from tensortap.page.responses import PageRequest, PageRoute
from tensortap.rooms.figures.figures.theme import themed
from tensortap.rooms.figures.routes import DEFAULT_STATISTIC, at_or_before, kind_of, searched
from tensortap.rooms.ranks.figure import ranks_figure
from tensortap.rooms.ranks.mesh import mesh_layout


def ranks(request: PageRequest) -> dict[str, Any]:
    """Return the heatmap of ranks by steps, or by layers, with its rows as a tree."""
    table, kind = request.entry.table(), kind_of(request)
    with table.lock:
        name = next(iter(request.texts("name")), "")
        step, opened = None, request.text("open")
        if request.text("across") == "layers":
            steps = table.steps(kind)
            step = at_or_before(steps, request.integer("step")) if len(steps) else 0
        figure = ranks_figure(
            table, mesh_layout(table), kind=kind, metric=request.text("metric", DEFAULT_STATISTIC),
            name=name, step=step, names=searched(request, table.layers(kind)),
            opened=opened.split(",") if opened else None,
            minus_median=bool(request.text("median")),
        )  # fmt: skip
    return {**themed(figure, request.theme), "step": step}


ROUTES = (PageRoute("ranks", ranks),)
