"""The figures of the page: asked for here, defined once in `viz.figures`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.errors import NotFound
from tensortap.record import Kind
from tensortap.viz.figures import (
    exponents_figure,
    heatmap_figure,
    lines_figure,
    sparkline,
    training_figure,
)
from tensortap.viz.figures.theme import message_figure
from tensortap.web.curves import curves
from tensortap.web.responses import Asked

if TYPE_CHECKING:
    from tensortap.table.table import Table

_METRIC = "rm2"
_SPARKLINES = 200  # in one answer
_LINES = 64


def theme_of(asked: Asked) -> str:
    """What the page looks like; anything else than dark is light."""
    return "dark" if asked.text("theme") == "dark" else "light"


def training(asked: Asked) -> dict[str, Any]:
    """The curve that is always in sight."""
    table, rank = asked.shown.table(), asked.number("rank")
    ranks = len(table.ranks()) if rank is None else 1
    found = curves(table, rank)
    return training_figure(found, ranks=ranks, height=104, theme=theme_of(asked))


def sparklines(asked: Asked) -> dict[str, Any]:
    """Lines of a few pixels for some names: what goes into an SVG path."""
    table, kind = asked.shown.table(), _kind(asked)
    metric = asked.text("metric", _METRIC)
    rank, found = asked.number("rank"), {}
    with table.lock:
        column = table.column(metric if table.has(metric) else _METRIC)
        for name in asked.texts("name")[:_SPARKLINES]:
            rows = table.series(kind, name, rank)
            values = column[rows]
            bad = bool(table.nonfinite(rows).any())
            if np.isnan(values).all() and table.has("value"):
                values = table.column("value")[rows]  # single numbers that were caught
                bad |= bool((table.is_known("value", rows) & ~np.isfinite(values)).any())
            d = sparkline(values, width=37, height=18, steps=table.step[rows])
            found[name] = {"d": d, "bad": bad}
    return {"lines": found}


def overview(asked: Asked) -> dict[str, Any]:
    """Layers by steps."""
    table, kind = asked.shown.table(), _kind(asked)
    metric = asked.text("metric", _METRIC)
    if not table.layers(kind):
        words = f"no {kind} in this run" if len(table) else "nothing has been captured yet"
        return message_figure(words, theme=theme_of(asked))
    return heatmap_figure(
        table, kind=kind, metric=metric, names=_matching(table, kind, asked),
        rank=asked.number("rank"), theme=theme_of(asked),
    )  # fmt: skip


def _matching(table: Table, kind: str, asked: Asked) -> list[str] | None:
    """The names that are not filtered away on the left."""
    import re

    if not asked.text("q"):
        return None
    try:
        wanted = re.compile(asked.text("q"), re.IGNORECASE)
    except re.error:
        return None  # half typed: the page says so where it is typed
    return [name for name in table.layers(kind) if wanted.search(name)]


def lines(asked: Asked) -> dict[str, Any]:
    """Chosen statistics of chosen names."""
    table, kind = asked.shown.table(), _kind(asked)
    names = asked.texts("name")[:_LINES]
    log = {"log": True, "linear": False}.get(asked.text("scale"))
    chosen = [stat for stat in asked.texts("stat") if table.has(stat)]
    return lines_figure(
        table, names=names, kind=kind, metrics=chosen or [_METRIC], rank=asked.number("rank"),
        log=log, panels={"name": "name", "stat": "metric"}.get(asked.text("by")),
        width_px=asked.number("width") or 900, theme=theme_of(asked),
    )  # fmt: skip


def exponents(asked: Asked) -> dict[str, Any]:
    """How the values of tensors are spread over powers of two."""
    table, kind = asked.shown.table(), _kind(asked)
    names = asked.texts("name")
    if not names:
        raise NotFound("choose a name on the left")
    over = asked.text("over") or None
    step = _step(table, kind, names[0], asked.number("step"))
    figure = exponents_figure(
        table, name=names if len(names) > 1 and over is None else names[0], kind=kind, step=step,
        rank=asked.number("rank"), dtype_annotation=asked.text("dtype") or None, over=over,
        log=asked.text("scale") == "log", theme=theme_of(asked),
    )  # fmt: skip
    return {**figure, "step": step}


def _step(table: Table, kind: str, name: str, wanted: int | None) -> int:
    """The step, or the last one before it at which the name was captured."""
    steps = table.steps(kind, name)
    if not len(steps):
        return wanted or 0
    if wanted is None:
        return int(steps[-1])
    before = int(np.searchsorted(steps, wanted, side="right")) - 1
    return int(steps[max(0, before)])


def _kind(asked: Asked) -> str:
    return (asked.kind or Kind.ACTIVATION).value
