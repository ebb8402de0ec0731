"""The thread that answers viewers, so that long answers do not delay records."""

from __future__ import annotations

import collections
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from tensortap.errors import TensortapError
from tensortap.wire import messages as wire

log = logging.getLogger("tensortap")


class AnswerThread:
    """Takes questions and puts the messages of their answers into `replies`."""

    def __init__(
        self, answer: Callable[[str, dict[str, Any]], bytes], on_reply: Callable[[], None]
    ) -> None:
        self.replies: collections.deque[tuple[bytes, list[Any]]] = collections.deque()
        self._answer = answer
        self._on_reply = on_reply
        self._questions: queue.SimpleQueue[tuple[bytes, wire.Query] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="tensortap-answers", daemon=True).start()

    def ask(self, route: bytes, query: wire.Query) -> None:
        """Queue a question."""
        self._questions.put((route, query))

    def close(self) -> None:
        """Stop after the questions that are queued."""
        self._questions.put(None)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            route, query = question
            body, error = b"", ""
            try:
                body = self._answer(query.what, query.arguments)
            except TensortapError as problem:
                error = str(problem)
            except Exception as problem:
                log.exception("tensortap: failed to answer a viewer")
                error = repr(problem)
            reply = wire.message(wire.REPLY, wire.Reply(query.id, error, len(body)))
            self.replies.append((route, [*reply]))
            for chunk in wire.chunks(query.id, wire.BODY, memoryview(body)):
                self.replies.append((route, chunk))
            self._on_reply()
