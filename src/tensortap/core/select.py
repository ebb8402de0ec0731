"""Steps as people write them."""

from __future__ import annotations

from tensortap.core.errors import TensortapError


def parse_steps(text: str | None) -> tuple[int | None, int | None] | None:
    """Return the first and the last step of ``10:20``, ``10:``, ``:20`` or ``10``; None is all."""
    if not text:
        return None
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else None
        high = (int(last) if last else None) if colon else low
    except ValueError:
        raise TensortapError(f"steps must be like 10:20, got {text!r}") from None
    if low is not None and high is not None and low > high:
        raise TensortapError(f"steps {text}: the first is after the last")
    return low, high
