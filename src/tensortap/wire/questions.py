"""What a viewer can ask a live session, and what it is told."""

from __future__ import annotations

import msgspec

from tensortap.record import Record

OVERVIEW, NAMES, HEADS, LOAD = "overview", "names", "heads", "load"
NEWER, HELD = "newer", "held"


class ClientRow(msgspec.Struct, frozen=True):
    """A program that sends, or has sent."""

    program: str
    host: str
    pid: int
    rank: int
    world_size: int
    connected: bool
    path: str  # how its tensors come: shared memory or TCP
    records: int
    nbytes: int
    unheard: int
    dropped: int
    failed: int


class NameRow(msgspec.Struct, frozen=True):
    """A name with its latest capture; `head` is the record without its value.

    `trend` is one number for each of the last captures (a number itself, a tensor's root mean
    square; NaN where something in it is not finite), `rate` how many come a second.
    """

    head: Record
    held: int
    evicted: int
    line: str
    trend: tuple[float, ...] = ()
    rate: float = 0.0


class Overview(msgspec.Struct, frozen=True):
    """All that a live session has to say about itself."""

    address: str
    pid: int
    started: float
    written: int
    written_nbytes: int
    nbytes: int
    bound: int
    evicted: int
    refused: dict[str, int]
    clients: tuple[ClientRow, ...]
    names: tuple[NameRow, ...]
    recent: tuple[NameRow, ...]
    alerts: tuple[NameRow, ...] = ()  # the last of them


class Rows(msgspec.Struct, frozen=True):
    """Several records, or names; `mark` is what to ask with for those that came later."""

    names: tuple[str, ...] = ()
    records: tuple[Record, ...] = ()
    mark: int = 0


class HeldRow(msgspec.Struct, frozen=True):
    """A name of a kind, and the steps at which tensors of it were kept whole."""

    name: str
    kind: str
    steps: tuple[int, ...]


class Held(msgspec.Struct, frozen=True):
    """Tensors after a mark; `started` and `evicted` tell whether those before still hold."""

    rows: tuple[HeldRow, ...]
    mark: int
    started: float
    evicted: int
