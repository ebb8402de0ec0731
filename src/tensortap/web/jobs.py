"""Work that takes longer than a moment: in a thread, with progress, and it can be cancelled."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from tensortap.errors import NotFound, TensortapError

_KEPT = 16  # results
_OFTEN = 0.1  # seconds between two words on the progress

Progress = Callable[[int, int], None]


class Cancelled(TensortapError):
    """Somebody does not want it any more."""


class Job:
    """One piece of work."""

    def __init__(self, id: str, tell: Callable[[str, Any], None]) -> None:  # noqa: A002
        self.id = id
        self._tell = tell
        self._told = 0.0
        self.cancelled = threading.Event()
        self.done = threading.Event()
        self.state: dict[str, Any] = {"state": "running", "done": 0, "total": 0}
        self.result: Any = None

    def progress(self, done: int, total: int) -> None:
        """How far it is; where it notices that it is not wanted any more."""
        if self.cancelled.is_set():
            raise Cancelled("cancelled")
        now = time.monotonic()
        if now - self._told >= _OFTEN:
            self._told = now
            self.say(state="running", done=done, total=total)

    def say(self, **state: Any) -> None:
        self.state = state
        self._tell(self.id, state)


class Jobs:
    """All work that was asked for, by its id; the same work is done once."""

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        self._tell = tell
        self._ids = itertools.count(1)
        self._held: collections.OrderedDict[str, Job] = collections.OrderedDict()
        self._by_key: dict[object, str] = {}
        self._lock = threading.Lock()

    def start(self, key: object, work: Callable[[Progress], Any]) -> Job:
        """Begin, unless the same is under way or done."""
        with self._lock:
            known = self._held.get(self._by_key.get(key, ""))
            if known is not None and known.state["state"] in ("running", "done"):
                return known
            job = Job(f"job{next(self._ids)}", self._tell)
            self._held[job.id] = job
            self._by_key[key] = job.id
            while len(self._held) > _KEPT:
                _, old = self._held.popitem(last=False)
                old.cancelled.set()
        threading.Thread(target=_run, args=(job, work), name="tensortap-job", daemon=True).start()
        return job

    def get(self, id: str) -> Job:  # noqa: A002  what it is called in the page
        """The work of that id."""
        with self._lock:
            job = self._held.get(id)
        if job is None:
            raise NotFound("that comparison is no longer held: ask for it again")
        return job


def _run(job: Job, work: Callable[[Progress], Any]) -> None:
    try:
        job.result = work(job.progress)
        job.say(state="done")
    except Cancelled:
        job.say(state="cancelled")
    except (TensortapError, ValueError, OSError) as error:
        job.say(state="failed", error=str(error))
    except Exception as error:
        job.say(state="failed", error=f"an error inside tensortap: {type(error).__name__}: {error}")
    finally:
        job.done.set()
