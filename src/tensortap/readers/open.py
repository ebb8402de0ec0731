"""From a path or an address to its reader."""

from __future__ import annotations

from tensortap.readers.live import LiveReader
from tensortap.wire.address import parse_address


def open_live(address: str | None = None, timeout: float = 5.0) -> LiveReader:
    """The reader of the live session at ``host:port``."""
    return LiveReader(parse_address(address), timeout)
