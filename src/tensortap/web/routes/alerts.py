"""The tab Alerts."""

from __future__ import annotations

from typing import Any

from tensortap.web.responses import PageRequest

_MAX_ALERTS = 2000
_FIELDS = ("rule", "name", "step", "rank", "module", "message", "origin", "again")


def alerts(request: PageRequest) -> dict[str, Any]:
    """Return the alerts in order of capture; if there are very many, the first and the last."""
    found = request.entry.table().alerts()
    half = _MAX_ALERTS // 2
    shown = found if len(found) <= _MAX_ALERTS else [*found[:half], *found[-half:]]
    rows = [
        {"kind": alert.kind.value, **{field: getattr(alert, field) for field in _FIELDS}}
        for alert in shown
    ]
    return {"total": len(found), "alerts": rows}
