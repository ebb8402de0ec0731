"""Settings from environment variables.

TENSORTAP_DISABLE    capture nothing until `tap.enable()`
TENSORTAP_STRICT     raise errors instead of counting and logging them
TENSORTAP_BUFFER     bytes that may wait in front of a sink: "5%", "2GB"
TENSORTAP_ARENA      bytes of recycled memory for snapshots: "256MB"
TENSORTAP_OVERFLOW   what a full queue to a live session does: "latest" or "block"
TENSORTAP_SHARED     let the umask decide who reads a run, not only its user
TENSORTAP_NO_ARENA   send tensors over the socket instead of shared memory
TENSORTAP_CONTROL    what sessions may change: 0 nothing, "stop" also to stop training
TENSORTAP_BUDGET     share of the time that tracking may take: "1%"
TENSORTAP_BISECT     set by `tensortap bisect`: the folder of its options and reports
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

from tensortap.core.limits import parse_size

log = logging.getLogger("tensortap")

_T = TypeVar("_T")


def flag(name: str) -> bool:
    """Return whether an environment variable is set to anything but 0, false, no or off."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def buffer_size() -> int:
    """Return how many bytes may wait in front of a sink."""
    if os.environ.get("TENSORTAP_BUFFER"):
        return _setting("TENSORTAP_BUFFER", "10%", parse_size)
    return min(1 << 30, parse_size("10%"))


def arena_size() -> int:
    """Return the bytes of recycled memory for snapshots, in whole pages."""
    size = min(_setting("TENSORTAP_ARENA", "256MB", parse_size), buffer_size())
    return size // 4096 * 4096


def memory_limit() -> int:
    """Return beyond how many bytes tensortap takes no more memory in the training process.

    That is enough for the arena, a full queue to a session and a full queue to a run.
    """
    return 3 * buffer_size()


def overflow_policy() -> str:
    """Return what a full queue to a live session does: ``latest`` or ``block``."""
    return _setting("TENSORTAP_OVERFLOW", "latest", _parse_policy)


def _setting(name: str, default: str, parse: Callable[[str], _T]) -> _T:
    """Return the parsed setting; log a malformed one and return the default instead."""
    try:
        return parse(os.environ.get(name) or default)
    except ValueError as error:
        log.warning("tensortap: %s: %s; using %s", name, error, default)
        return parse(default)


def _parse_policy(text: str) -> str:
    if text not in ("latest", "block"):
        raise ValueError(f"overflow policy must be 'latest' or 'block', got {text!r}")
    return text
