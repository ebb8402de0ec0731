"""The route for what analyses have recorded: small lines per layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tensortap.core.record import Kind
from tensortap.page.responses import PageRequest, PageRoute
from tensortap.rooms.figures.figures.training import sparkline
from tensortap.rooms.figures.routes import searched, table_and_rank
from tensortap.table.table import Table, locked
from tensortap.text.tensors import number

_MAX_LINES = 600


class QuantityLine(NamedTuple):
    """A quantity of a layer over all steps: a small SVG path, and the last number."""

    name: str
    quantity: str
    path: str
    last: str


def by_layer(names: Iterable[str]) -> list[str]:
    """Return names in the order of layers: the model first, parameters in their module."""
    first: dict[str, int] = {}  # position of each module, at its first appearance

    def place(name: str) -> tuple[bool, list[int]]:
        parts = name.split(".")[:-1]
        modules = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
        return parts != ["model"], [first.setdefault(each, len(first)) for each in modules]

    return sorted(names, key=place)


@locked
def layer_lines(
    table: Table, names: Sequence[str], rank: int | None = None
) -> dict[str, list[QuantityLine]]:
    """Return what analyses have recorded under these names: layer → its quantities."""
    lines: dict[str, list[QuantityLine]] = {}
    for name in names:
        layer, _, quantity = name.rpartition(".")
        rows = table.series(Kind.HEALTH.value, name, rank)
        values = table.column("value")[rows]
        path = sparkline(values, width=96, height=24, steps=table.step[rows])
        last = number(float(values[-1])) if len(values) else ""
        lines.setdefault(layer, []).append(QuantityLine(name, quantity, path, last))
    return lines


def analyses(request: PageRequest) -> dict[str, Any]:
    table, rank = table_and_rank(request)
    names = by_layer(table.layers(Kind.HEALTH.value))
    found = searched(request, names)
    lines = layer_lines(table, found[:_MAX_LINES], rank)
    return {
        "layers": [
            {"layer": layer, "lines": [line._asdict() for line in own]}
            for layer, own in lines.items()
        ],
        "shown": min(len(found), _MAX_LINES),
        "found": len(found),
        "total": len(names),
    }


ROUTES = (PageRoute("analyses", analyses),)
