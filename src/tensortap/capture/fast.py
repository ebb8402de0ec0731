"""The C fast path into a queue, for small values.

`FastPath.capture` does in C what `Pipeline.capture` does in Python. Without the extension there
is no fast path, and every value takes the way through Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from tensortap.capture.ticket import Ticket
from tensortap.core import ranks
from tensortap.core.history import OVERHEAD
from tensortap.core.record import Kind, Record, TensorData, Value
from tensortap.values.protocol import SMALL, Adapter
from tensortap.values.protocol import type_name as _type_name

FastCapture: Any
ARRAY: int
FLOAT: int
READ: int
TAKE: int

type_name: Callable[[type], str] = functools.lru_cache(4096)(_type_name)


class RecordBlock(Protocol):
    """Small records, gathered as columns: `ColumnWriter` of the extension.

    It takes records while it is the `block` of the queue's state.
    """

    tickets: list[Ticket]
    weight: int  # bytes of all records, as the queue counts them
    nbytes: int  # bytes of their rows and payloads
    # name, type, framework, dtype, shape, (rank, world size) of each column
    columns: list[tuple[str, str, str, str, tuple[int, ...], tuple[int, int]]]

    def __len__(self) -> int: ...

    def entries(self) -> list[Any]:
        """Return None, the ticket and the weight of each record."""
        ...

    def copy(self, target: bytearray, /) -> None:
        """Copy rows and payloads to a buffer of `nbytes` bytes."""
        ...

    def move(self, target: bytearray | memoryview, /) -> None:
        """Move rows and payloads to a buffer of `nbytes` bytes, without the interpreter lock."""
        ...


class PlainQueueState:
    """Numbers that the training thread and the thread of a queue share, without the extension."""

    __slots__ = ("asleep", "block", "captured", "got", "nbytes", "put", "spent_ns")

    def __init__(self) -> None:
        self.put = 0  # bytes that ever entered the queue
        self.got = 0  # bytes that ever left it, changed under the lock of the queue
        self.captured = 0  # small values that took the fast path
        self.nbytes = 0  # their bytes
        self.spent_ns = 0  # the time they took
        self.asleep = False  # whether the thread of the queue waits to be woken
        self.block: RecordBlock | None = None  # the block that takes small records


if TYPE_CHECKING:
    QueueState = PlainQueueState
else:
    try:
        from tensortap.capture._fast import ARRAY, FLOAT, READ, TAKE, FastCapture, QueueState
    except ImportError:  # no compiler when tensortap was installed
        FastCapture, QueueState = None, PlainQueueState
        FLOAT, ARRAY, TAKE, READ = 0, 1, 2, 3


class FastPath:
    """Captures small values of the classes that it has learned.

    `capture(value, name, number, step, call)` returns a ticket, or None if the value has to take
    the way through Python; then nothing has changed.
    """

    def __init__(self, **queue: Any) -> None:
        self._classes: dict[type, tuple[object, ...]] = {}
        self._dtypes: dict[object, str] = {}
        self.unsuited: set[type] = set()  # classes that always take the way through Python
        self.capture: Callable[..., Ticket | None] = FastCapture(
            record=Record,
            tensor=TensorData,
            ticket=Ticket,
            kind=Kind.VALUE,
            classes=self._classes,
            dtypes=self._dtypes,
            ranks=ranks.rank_and_world_size,
            small=SMALL,
            overhead=OVERHEAD,
            **queue,
        )

    def learn(self, value: Any, adapter: Adapter, snapshot: Value) -> None:
        """Let values of this class take the fast path from now on."""
        cls = type(value)
        name = type_name(cls)
        if cls is float:
            self._classes[cls] = (FLOAT, name, None)
        elif name == "numpy.ndarray" and isinstance(snapshot, TensorData):
            self._dtypes[value.dtype] = snapshot.dtype
            self._classes[cls] = (ARRAY, name, None)
        elif adapter.snapshot_small is not None and adapter.in_place is not None:
            self._classes[cls] = (READ, name, adapter.snapshot_small, *adapter.in_place)
        elif adapter.snapshot_small is not None:
            self._classes[cls] = (TAKE, name, adapter.snapshot_small)
        else:
            self.unsuited.add(cls)
