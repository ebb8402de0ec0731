"""The numbers that the training thread and the background thread share, and the fast way in.

`Hot` captures small values in C; without the extension it is None and everything goes through
`Session.capture`, which does the same in Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

Hot: Any
ARRAY: int
FLOAT: int
TAKE: int


class PlainMeter:
    """What a `Meter` is where the extension was not built."""

    __slots__ = ("asleep", "captured", "got", "nbytes", "put", "spent_ns")

    def __init__(self) -> None:
        self.put = 0  # bytes that ever went into the queue; only ever added to
        self.got = 0  # bytes that ever left it, changed under the lock
        self.captured = 0  # small values that went in the fast way, and their bill
        self.nbytes = 0
        self.spent_ns = 0
        self.asleep = False  # the background thread waits for the bell


if TYPE_CHECKING:
    Meter = PlainMeter
else:
    try:
        from tensortap.pipeline._fast import ARRAY, FLOAT, TAKE, Hot, Meter
    except ImportError:  # no compiler when it was installed
        Hot, Meter = None, PlainMeter
        FLOAT, ARRAY, TAKE = 0, 1, 2
