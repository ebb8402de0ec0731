"""The route for the health of a run: one row per rule."""

from __future__ import annotations

from typing import Any

from tensortap.page.responses import PageRequest, PageRoute
from tensortap.rooms.health.report import health_of


def health(request: PageRequest) -> dict[str, Any]:
    """Return what each rule has found, worst first."""
    entry = request.entry
    rows = health_of(entry.table(), entry.reader(), entry.alerts())
    return {"rules": [row._asdict() for row in rows]}


ROUTES = (PageRoute("health", health),)
