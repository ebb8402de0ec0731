"""NaN and infinities that a rank received from another one."""

from __future__ import annotations

import msgspec

from tensortap.alerts import Alert
from tensortap.core.record import Kind


def with_sources(alerts: list[Alert]) -> list[Alert]:
    """Say of NaN and Inf that came from another rank from which one, and put them last."""
    made: list[Alert] = []
    received: list[Alert] = []
    outputs = Kind.ACTIVATION, Kind.GRADIENT
    bad = [alert for alert in alerts if alert.rule in ("nan", "inf")]
    for alert in alerts:
        sources = (
            each for each in bad
            if each.step == alert.step and each.rank != alert.rank and each.kind in outputs
        )  # fmt: skip
        gradient = alert.kind is Kind.WEIGHT_GRADIENT and alert.rule in ("nan", "inf")
        source = next(sources, None) if gradient else None
        if source is None:
            made.append(alert)
        else:
            text = f"{alert.message.partition(';')[0]}; it came through communication from rank "
            text += f"{source.rank}, where {source.name} ({source.kind.value}) had it before"
            received.append(msgspec.structs.replace(alert, message=text, origin=source.origin))
    return made + received
