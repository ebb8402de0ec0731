"""The figures over steps and exponents; `viz.figures` draws them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.record import Kind
from tensortap.page.catalog import RunEntry
from tensortap.page.responses import PageRequest, PageRoute
from tensortap.rooms.figures import tensor_routes as tensors
from tensortap.rooms.figures.figures import (
    exponents_figure,
    heatmap_figure,
    lines_figure,
    sparkline,
    training_figure,
)
from tensortap.rooms.figures.figures.encoding import AUTO
from tensortap.rooms.figures.figures.theme import message_figure, themed
from tensortap.table.frames import choose_rank

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.table.table import Table

DEFAULT_STATISTIC = "rm2"
_MAX_SPARKLINES = 200
_MAX_LINES = 64


def training(request: PageRequest) -> dict[str, Any]:
    """Return the figure of the training curves."""
    table, rank = request.entry.table(), None  # curves need no whole tensors
    if request.text("rank") not in ("", "all"):
        table, rank = table_and_rank(request)
    return themed(training_figure(table, rank=rank, height=104), request.theme)


def sparklines(request: PageRequest) -> dict[str, Any]:
    """Return the SVG paths of small lines, and which names had NaN or Inf."""
    (table, rank), kind = table_and_rank(request), kind_of(request)
    metric = request.text("metric", DEFAULT_STATISTIC)
    lines = {}
    with table.lock:
        column = table.column(metric if table.has(metric) else DEFAULT_STATISTIC)
        for name in request.texts("name")[:_MAX_SPARKLINES]:
            rows = table.series(kind, name, rank)
            values = column[rows]
            bad = bool(table.nonfinite(rows).any())
            if np.isnan(values).all() and table.has("value"):  # single numbers
                values = table.column("value")[rows]
                bad |= bool((table.is_known("value", rows) & ~np.isfinite(values)).any())
            path = sparkline(values, width=37, height=18, steps=table.step[rows])
            lines[name] = {"d": path, "bad": bad}
    return {"lines": lines}


def overview(request: PageRequest) -> dict[str, Any]:
    """Return the heatmap of layers by steps."""
    (table, rank), kind = table_and_rank(request), kind_of(request)
    names = table.layers(kind)
    if not names:
        message = f"no {kind} in this run" if table.records() else "nothing has been captured yet"
        return themed(message_figure(message), request.theme)
    key = request.text("key")  # a state of the optimizer, such as exp_avg
    names = [name for name in names if not key or name.endswith(f".{key}")]
    figure = heatmap_figure(
        table, kind=kind, metric=request.text("metric", DEFAULT_STATISTIC),
        names=searched(request, names), rank=rank, relative=request.text("colors") != "absolute",
    )  # fmt: skip
    return themed(figure, request.theme)


def searched(request: PageRequest, names: list[str]) -> list[str]:
    """Return the names that the search matches."""
    try:
        pattern = request.pattern("q", ignore_case=True)
    except TensortapError:
        return names  # not typed completely yet; the page marks the search field
    return [name for name in names if pattern is None or pattern.search(name)]


def lines(request: PageRequest) -> dict[str, Any]:
    """Return the figure of statistics of names over steps."""
    table, rank = table_and_rank(request)
    statistics = [name for name in request.texts("stat") if name == AUTO or table.has(name)]
    figure = lines_figure(
        table, names=request.texts("name")[:_MAX_LINES], kind=kind_of(request),
        metrics=statistics or [DEFAULT_STATISTIC], rank=rank,
        log={"log": True, "linear": False}.get(request.text("scale")),
        panels={"name": "name", "stat": "metric"}.get(request.text("by")),
        width_px=request.integer("width") or 900,
    )  # fmt: skip
    return themed(figure, request.theme)


def exponents(request: PageRequest) -> dict[str, Any]:
    """Return the figure of values by powers of two."""
    (table, rank), kind, names = table_and_rank(request), kind_of(request), request.texts("name")
    if not names:
        raise NotFound("choose a name on the left")
    step = _captured_step(table, kind, names[0], request.integer("step"))
    figure = exponents_figure(
        table, name=names, kind=kind, step=step, rank=rank,
        dtype_annotation=request.text("dtype") or None, log=request.text("scale") == "log",
    )  # fmt: skip
    return {**themed(figure, request.theme), "step": step}


def table_and_rank(request: PageRequest) -> tuple[Table, int | None]:
    """Return the table to draw, and the rank: whole tensors if the page chose none."""
    rank, entry = request.text("rank"), request.entry
    if isinstance(entry, RunEntry) and request.kind in (Kind.VALUE, Kind.LOCAL):
        entry.complete()
    return choose_rank(entry.table(), rank if rank == "all" else request.integer("rank"))


def _captured_step(table: Table, kind: str, name: str, wanted: int | None) -> int:
    """Return the last step at or before the wanted one at which a name was captured."""
    steps = table.steps(kind, name)
    return at_or_before(steps, wanted) if len(steps) else wanted or 0


def at_or_before(steps: NDArray[np.int64], wanted: int | None) -> int:
    """Return the last of some steps that is not after the wanted one, or else the first."""
    if wanted is None:
        return int(steps[-1])
    return int(steps[max(0, int(np.searchsorted(steps, wanted, side="right")) - 1)])


def kind_of(request: PageRequest) -> str:
    """Return the kind that the page shows."""
    return (request.kind or Kind.ACTIVATION).value


ROUTES = (
    PageRoute("training", training),
    PageRoute("sparklines", sparklines),
    PageRoute("overview", overview),
    PageRoute("lines", lines),
    PageRoute("exponents", exponents),
    PageRoute("tensor", tensors.tensor),
    PageRoute("tensor.npy", tensors.download, cached=False),
)
