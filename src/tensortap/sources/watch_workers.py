"""Worker processes of a watcher: started on demand, fed by name, ended together."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time

from tensortap.pipeline.pipeline import pipeline
from tensortap.pipeline.queue import Queue
from tensortap.settings import flag
from tensortap.sinks.launch import Task
from tensortap.sinks.worker import Worker


@dataclasses.dataclass(frozen=True)
class WatchReceipt:
    """What has become of the watched values.

    `captured` records were copied and not dropped afterwards, and of them `processed` went through
    the user's function. `dropped` values did not: the queue or the worker was over budget, the
    worker died or ran out of time ("disconnected"), or the function raised ("error").
    """

    captured: int
    processed: int
    dropped: int
    reasons: dict[str, int]

    @property
    def waiting(self) -> int:
        """Records that are still on their way."""
        return self.captured - self.processed


class WorkerPool:
    """The workers of one watcher; each name always goes to the same one."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = tasks
        self.workers: list[Worker] = []
        self._assigned: dict[str, int] = {}  # name → index of its worker
        self._lock = threading.RLock()
        self._may_start = True  # once: a failure is not repeated with every record

    @property
    def alive(self) -> bool:
        """Whether all workers run."""
        return bool(self.workers) and all(worker.sink.alive for worker in self.workers)

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [worker.sink.pid for worker in self.workers]

    def start(self) -> None:
        """Start the workers unless they have been started or ended."""
        with self._lock:
            if self._may_start:
                self._may_start = False
                arena = not flag("TENSORTAP_NO_ARENA")
                for task in self._tasks:
                    self.workers.append(Worker(task, pipeline.pool, arena=arena))

    def queue(self, name: str) -> Queue | None:
        """Return the queue to the worker of a name; None if no worker can be started."""
        self.start()  # if this rank was switched off so far
        workers = self.workers
        if len(workers) < 2:
            return workers[0].queue if workers else None
        index = self._assigned.get(name)
        if index is None:
            with self._lock:  # round robin: each worker gets as many names as the others
                index = self._assigned.setdefault(name, len(self._assigned) % len(workers))
        return workers[index].queue

    def receipt(self) -> WatchReceipt:
        """Return the counts as the workers report them now."""
        reasons: collections.Counter[str] = collections.Counter()
        workers = list(self.workers)
        for worker in workers:
            worker.sink.ask(1.0)
            reasons.update(worker.sink.reasons())
        processed = sum(worker.sink.processed for worker in workers)
        waiting = sum(worker.waiting for worker in workers)
        return WatchReceipt(processed + waiting, processed, reasons.total(), dict(reasons))

    def flush(self, timeout: float | None) -> bool:
        """Wait until everything sent has been processed; return False on timeout."""
        deadline = time.monotonic() + (self._tasks[0].timeout if timeout is None else timeout)
        # every worker is asked, even after the deadline
        done = [worker.flush(max(0.0, deadline - time.monotonic())) for worker in self.workers]
        return all(done)

    def close(self, timeout: float | None) -> None:
        """End the workers at the same time: each may use the whole timeout."""
        with self._lock:
            self._may_start = False
        threads = [
            threading.Thread(target=worker.close, args=(timeout,), daemon=True)
            for worker in self.workers[1:]
        ]
        for thread in threads:
            thread.start()
        for worker in self.workers[:1]:
            worker.close(timeout)
        for thread in threads:
            thread.join()
