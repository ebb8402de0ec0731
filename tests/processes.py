"""What tests ask about processes that they have started."""

from __future__ import annotations

import threading
import time
from pathlib import Path


def wait_for(found, what="it did not happen"):
    """Wait until `found` is true, for so long that only a defect lets the time run out."""
    deadline = time.monotonic() + 120
    while not found():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.01)


def in_threads(work, arguments):
    """Call a function in one thread for each argument, and wait for all of them."""
    threads = [threading.Thread(target=work, args=(each,)) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def gone(pid):
    """Whether a process has ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True
