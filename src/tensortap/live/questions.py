"""The questions that viewers ask a server, and the types of the answers.

`tensortap.live.answers` answers them; `tensortap.live.reader` asks them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tensortap.core.record import Kind, Record

OVERVIEW, NAMES, HEADS, LOAD = "overview", "names", "heads", "load"
SINCE, TENSOR_STEPS = "since", "tensor_steps"


class Heads(msgspec.Struct, frozen=True):
    """The arguments of `HEADS`: the records of a name, and with `last` the newest ones."""

    name: str
    step: int | None = None
    rank: int | None = None
    kind: Kind | None = None
    last: Annotated[int, msgspec.Meta(ge=1)] | None = None


class ClientRow(msgspec.Struct, frozen=True):
    """A program that sends records, or has sent some."""

    program: str
    host: str
    pid: int
    rank: int
    world_size: int
    connected: bool
    path: str  # how tensors arrive: shared memory or TCP
    records: int
    nbytes: int
    dropped: int  # values that the program did not send, for any of the `reasons`
    reasons: dict[str, int]


class NameRow(msgspec.Struct, frozen=True):
    """A name with its latest record, as text in `line`; `head` is that record without its value.

    `trend` has one number for each of the last records (a number itself, a tensor's root mean
    square; NaN where an element is not finite). `rate` is captures per second.
    """

    head: Record
    records: int  # in the history
    evicted: int
    line: str
    trend: tuple[float, ...] = ()
    rate: float = 0.0


class Overview(msgspec.Struct, frozen=True):
    """The state of a server: its counts, its clients, and its names with their latest records."""

    address: str
    pid: int
    started: float
    written: int
    written_nbytes: int
    nbytes: int
    bound: int
    evicted: int
    rejected: dict[str, int]
    clients: tuple[ClientRow, ...]
    names: tuple[NameRow, ...]
    recent: tuple[NameRow, ...]
    alerts: tuple[NameRow, ...] = ()  # the most recent ones


class RecordList(msgspec.Struct, frozen=True):
    """Names or records; `cursor` is what to ask for later ones with."""

    names: tuple[str, ...] = ()
    records: tuple[Record, ...] = ()
    cursor: int = 0


class TensorSteps(msgspec.Struct, frozen=True):
    """The steps at which whole tensors of a name and kind are in the history."""

    name: str
    kind: str
    steps: tuple[int, ...]


class TensorStepsList(msgspec.Struct, frozen=True):
    """Whole tensors after a cursor.

    Earlier answers stay valid as long as `started` and `evicted` have not changed.
    """

    rows: tuple[TensorSteps, ...]
    cursor: int
    started: float
    evicted: int
