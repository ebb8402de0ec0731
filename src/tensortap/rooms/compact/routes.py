"""The page's offer to compact a large run: a process of its own does it."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from tensortap.core.errors import TensortapError
from tensortap.page.catalog import RunEntry
from tensortap.page.jobs import Progress
from tensortap.page.responses import PageRequest, PageRoute


def state(request: PageRequest) -> dict[str, Any]:
    """Return how many windows a run has."""
    return {"windows": len(_entry(request).reader().windows)}


def start(request: PageRequest) -> dict[str, Any]:
    """Start to compact a run, or find the job that does."""
    entry = _entry(request)

    def work(progress: Progress) -> None:
        command = [sys.executable, "-m", "tensortap", "compact", entry.where]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                while process.poll() is None:
                    progress(0, 0)
                    time.sleep(0.1)
            finally:
                process.kill()  # what it has not finished is removed by the next one
            if process.returncode:
                raise TensortapError((process.stderr.read() if process.stderr else "").strip())
        entry.close()  # it is opened again with its windows
        entry.version += 1

    job = request.context.jobs.start(f"compact {entry.where} {entry.version}", work)
    return {"job": job.id, **job.state}


def _entry(request: PageRequest) -> RunEntry:
    if not isinstance(request.entry, RunEntry):
        raise TensortapError("only runs can be compacted, not live sessions")
    return request.entry


ROUTES = (
    PageRoute("compact", state, cached=False),
    PageRoute("compact/start", start, cached=False, method="POST"),
)
