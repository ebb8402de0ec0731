"""A client, as the server sees it."""

from __future__ import annotations

import collections
import contextlib
import time

from tensortap.buffers import Mapped, OutOfMemory, Pool
from tensortap.server.assembly import Assembly
from tensortap.wire import messages as wire

_SPARSE = 0.75  # a segment of which less is used is given up when its client is gone


class Peer:
    """One program; it outlives its connections."""

    def __init__(self, who: wire.Client, role: str) -> None:
        self.who = who
        self.role = role
        self.since = time.time()
        self.records = 0
        self.nbytes = 0
        self.last = 0  # number of the last batch: one that comes again is not taken again
        # kept beyond a connection: the word of it may not have arrived
        self.turned_down: collections.deque[int] = collections.deque(maxlen=1000)
        self.tally = wire.Tally()
        self.arena_pid: int | None = None  # where its segments are, if they can be read
        self.mapped: dict[int, Mapped] = {}
        self.disconnect()

    def connect(self, route: bytes, proof: wire.Proof, arena: bool) -> None:
        """The program has connected, for the first time or again."""
        self.disconnect()
        self.connected = True
        self.route = route
        self.who = proof.client
        if proof.arena is not None and arena:
            self.arena_pid = proof.arena.pid

    def disconnect(self, pool: Pool | None = None) -> None:
        """The connection is gone: what it sent stays, what was half sent does not."""
        if pool is not None:
            self._move_out(pool)
        self.connected = False
        self.route = b""
        self.arena_pid = None
        self.granted = 0  # credit in all
        self.owed = 0  # credit to be given back with the next acknowledgement
        self.refused: list[int] = []
        self.assemblies: collections.OrderedDict[int, Assembly] = collections.OrderedDict()
        self.mapped = {}
        # blocks of an old connection are nobody's: the client does not use them again
        self.freed: collections.deque[tuple[int, int]] = collections.deque()

    def _move_out(self, pool: Pool) -> None:
        for mapped in self.mapped.values():
            if mapped.used < _SPARSE * mapped.nbytes:
                for slot in list(mapped.slots):
                    # no room: the segment stays, which is only a waste
                    with contextlib.suppress(OutOfMemory):
                        slot.move(pool)

    def take_freed(self) -> tuple[tuple[int, int], ...]:
        """The blocks that are free again, to be told to the client."""
        freed = []
        with contextlib.suppress(IndexError):
            while True:
                freed.append(self.freed.popleft())
        return tuple(freed)
