"""Long work in threads, with progress and cancellation."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from tensortap.core.errors import NotFound, TensortapError

_MAX_JOBS = 16

Progress = Callable[[int, int], None]
Report = Callable[[str, dict[str, Any]], None]


class JobCancelled(TensortapError):
    """Raised inside the work of a job that was cancelled."""


class Job:
    """One piece of work; `report` receives its id and state."""

    def __init__(self, id: str, report: Report) -> None:  # noqa: A002
        self.id = id
        self.cancelled = threading.Event()
        self.state: dict[str, Any] = {"state": "running", "done": 0, "total": 0}
        self.result: Any = None
        self._report = report
        self._reported = 0.0

    def progress(self, done: int, total: int) -> None:
        """Report progress; raise JobCancelled if the job was cancelled."""
        if self.cancelled.is_set():
            raise JobCancelled("cancelled")
        now = time.monotonic()
        if now - self._reported >= 0.1:
            self._reported = now
            self._set(state="running", done=done, total=total)

    def _set(self, **state: Any) -> None:
        self.state = state
        self._report(self.id, state)

    def run(self, work: Callable[[Progress], Any]) -> None:
        """Do the work and report how it ended."""
        try:
            self.result = work(self.progress)
            self._set(state="done")
        except JobCancelled:
            self._set(state="cancelled")
        except (TensortapError, ValueError, OSError) as error:
            self._set(state="failed", error=str(error))
        except Exception as error:
            reason = f"internal error in tensortap: {type(error).__name__}: {error}"
            self._set(state="failed", error=reason)


class Jobs:
    """The most recent jobs; work with the same key is done once."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._ids = itertools.count(1)
        self._jobs: dict[str, Job] = {}  # by key, the oldest first
        self._lock = threading.Lock()

    def start(self, key: str, work: Callable[[Progress], Any]) -> Job:
        """Start a job, unless one with the same key is running or done."""
        with self._lock:
            known = self._jobs.get(key)
            if known is not None and known.state["state"] in ("running", "done"):
                return known
            self._jobs.pop(key, None)
            job = self._jobs[key] = Job(f"job{next(self._ids)}", self._report)
            if len(self._jobs) > _MAX_JOBS:
                self._jobs.pop(next(iter(self._jobs))).cancelled.set()
        threading.Thread(target=job.run, args=[work], name="tensortap-job", daemon=True).start()
        return job

    def get(self, id: str) -> Job:  # noqa: A002
        """Return a job."""
        with self._lock:
            for job in self._jobs.values():
                if job.id == id:
                    return job
        raise NotFound("this comparison is no longer in memory: start it again")
