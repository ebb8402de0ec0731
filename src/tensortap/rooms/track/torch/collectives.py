"""Tensors that a collective is still computing, observed once the program has used them.

Waiting in a hook would end the overlap of communication with work. The program itself waits when
it first uses the tensor, so the next hook finds it complete. A view of it is waited for in its
place: then the tensor is observed a few hooks later, when the collective is long done.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

from tensortap.rooms.track.observing import HookObserver
from tensortap.values.torch import private

_MOST = 4  # tensors that are kept waiting: each is memory that the program may have freed
CHANGED = "a collective computed its output, which was changed in place before it could be read"


class AwaitedTensor(NamedTuple):
    """A tensor to look at when its collective is done."""

    result: Any
    version: int
    name: str
    look: Callable[[], object]


class Collectives:
    """The tensors of one model that wait for a collective."""

    def __init__(self, observer: HookObserver) -> None:
        self._observer = observer
        self.waiting: collections.deque[AwaitedTensor] = collections.deque()

    def observe(self, tensor: Any, name: str, look: Callable[[], object]) -> None:
        """Call `look`, at once or when the collective that computes the tensor is done."""
        result = private.running_collective(tensor)
        if result is None:
            look()
            return
        version = private.version_of(private.result_of(result))
        self.waiting.append(AwaitedTensor(result, version, name, look))

    def poll(self, most: int = _MOST) -> None:
        """Look at the tensors that are complete, and at the oldest ones beyond `most`."""
        while self.waiting and (self.waiting[0].result.completed or len(self.waiting) > most):
            result, version, name, look = self.waiting.popleft()
            try:
                if private.version_of(private.result_of(result)) != version:
                    self._observer.unseen[name] = CHANGED
                    continue
                look()
            except Exception as error:
                self._observer.fault(name, error)
