"""A training program that does what a test tells it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# catches a number at every word from the test, and tells its receipt
TALKS = """
    import json, sys, numpy as np, tensortap as tap
    from tensortap.capture.pipeline import pipeline
    pool = pipeline.pool
    i = 0
    def catch(count, size=1, wait=0):
        global i
        for _ in range(count):
            ticket = tap.catch(np.full(size, i), "x")
            i += 1
            if wait:
                ticket.wait(wait)
    def receipt():
        r = tap.receipt()
        return dict(r.reasons, captured=r.captured, skipped=r.skipped, dropped=r.dropped,
                    state=list(r.sessions.values()), sent=i)
    print("ready")
    for line in sys.stdin:
        print(json.dumps(eval(line)))
"""


class Talker:
    """A training program that does what it is told."""

    def __init__(self, program: Any) -> None:
        self.program = program
        assert program.line() == "ready"

    def __call__(self, expression: str) -> Any:
        self.program.say(expression)
        return json.loads(self.program.line())


def segments(pid: int) -> int:
    """How many segments of tensortap a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:tensortap")


def shared_files() -> set[str]:
    """Return the files in shared memory, without semaphores: other tests make some meanwhile."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
