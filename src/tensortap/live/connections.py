"""The live sessions that this process sends to, connected when they are first needed."""

from __future__ import annotations

import hashlib  # noqa: F401 - its first import, in a thread, must not meet one in a signal handler
import logging
import os
import threading
import time
from collections.abc import Sequence

from tensortap.capture.pipeline import Pipeline, pipeline
from tensortap.capture.queue import Queue
from tensortap.core.busy import importing, is_busy, section
from tensortap.core.settings import buffer_size, flag, overflow_policy
from tensortap.live.address import Address, parse_address

log = logging.getLogger("tensortap")


class Connections:
    """Queues to live sessions, by address.

    The default session gets every record of the pipeline. Others get only what a source
    addresses to them.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        pipeline.sessions = self
        self._reset()
        # the pipeline keeps the queues of the parent
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._default: Queue | None = None
        self._queues: dict[Address, Queue] = {}
        self._lock = threading.Lock()  # several threads may catch the first value
        self._pipeline.expecting = True  # until the default session was looked for
        self._pipeline.refresh()

    def connect(self) -> bool:
        """Connect to the default session at the first call; return whether anybody listens."""
        pipeline = self._pipeline
        if pipeline.expecting and pipeline.enabled and not pipeline.closed and not is_busy():
            self._connect()
        return pipeline.on

    @section
    def _connect(self) -> None:
        pipeline = self._pipeline
        with self._lock:
            if not pipeline.expecting:
                return
            try:
                self._default = self._queue(parse_address())
            except (ValueError, RuntimeError) as error:
                if not pipeline.queues or pipeline.strict:
                    raise
                # a wrong TENSORTAP_SERVER, or too few threads, must not cost the run a value
                log.warning("tensortap: not connecting to TENSORTAP_SERVER: %s", error)
            else:
                pipeline.attach(self._default)
            pipeline.expecting = False
            pipeline.refresh()

    def queues(self, server: str) -> Sequence[Queue]:
        """Return the queues that accept a value for `server` instead of the default session."""
        if not self._pipeline.enabled or self._pipeline.closed:
            return ()
        address = parse_address(server)
        addressed = self._queues.get(address) or self._connect_to(address)
        queues = [queue for queue in self._pipeline.queues if queue is not self._default]
        return [queue for queue in (*queues, addressed) if queue.accepting]

    @section
    def _connect_to(self, address: Address) -> Queue:
        with self._lock:
            return self._queue(address)

    def _queue(self, address: Address) -> Queue:
        """Return the queue to a session; call it with the lock."""
        found = self._queues.get(address)
        if found is not None:
            return found
        start = time.perf_counter_ns()
        with importing:
            from tensortap.live.sink import LiveSink

        arena, pipeline = not flag("TENSORTAP_NO_ARENA"), self._pipeline
        sink = LiveSink(
            address, pipeline.pool, pipeline.ledger, arena=arena, step=lambda: pipeline.clock.step
        )
        queue = self._queues[address] = Queue(
            sink, budget=buffer_size(), overflow=overflow_policy(), name=f"live-{address}"
        )
        pipeline.attach(queue, every_record=False)
        pipeline.ledger.charge("connecting", time.perf_counter_ns() - start)
        return queue


connections = Connections(pipeline)
