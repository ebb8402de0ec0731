"""What tests ask about processes that they have started."""

from __future__ import annotations

import time
from pathlib import Path


def wait_for(found, timeout=60):
    """Wait until `found` is true."""
    deadline = time.monotonic() + timeout
    while not found():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def gone(pid):
    """Whether a process has ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True
