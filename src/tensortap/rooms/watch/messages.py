"""Messages between a training process and its worker, besides records.

Each message is one line of JSON over a pair of sockets. Other text on it is the traceback that the
interpreter of a crashed worker writes there.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec

UNASKED = -1
"""Number of an `Answer` that the worker sends by itself."""

TIME_UP = 75
"""Exit code of a worker that ran out of time."""

_LONGEST_CRASH_TEXT = 64 << 10


class Orders(msgspec.Struct, frozen=True):
    """The first message to a worker: its orders.

    `functions` is the pickle of what a spawned worker calls, and `path` where it finds modules. At
    most `per_name` records of one name wait to be processed, and `bound` bytes in all.
    """

    key: bytes
    parent_pid: int
    timeout: float
    bound: int
    per_name: int
    functions: bytes
    path: tuple[str, ...]


class WorkerCounts(msgspec.Struct, frozen=True):
    """Counts of processed records, dropped records, and records for which the code raised."""

    processed: int = 0
    errors: int = 0
    dropped: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker listens on a port."""

    port: int


class Fault(msgspec.Struct, frozen=True, tag=True):
    """The user's code raised an error for a name; sent once per error."""

    name: str
    text: str


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to an `Ask`; its number may be `UNASKED`."""

    number: int
    counts: WorkerCounts


class Done(msgspec.Struct, frozen=True, tag=True):
    """The worker ends; `error` is the traceback if it failed."""

    counts: WorkerCounts
    error: str = ""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Ask for the counts; with `drained` after all records have been processed."""

    number: int
    drained: bool = False


class End(msgspec.Struct, frozen=True, tag=True):
    """No more records will come: finish within `timeout` seconds."""

    timeout: float


WorkerMessage = Ready | Fault | Answer | Done | Ask | End
_decoder = msgspec.json.Decoder(WorkerMessage)


def send(line: socket.socket, message: WorkerMessage) -> bool:
    """Send a message; return False if the other process has ended."""
    try:
        line.sendall(msgspec.json.encode(message) + b"\n")
    except OSError:
        return False
    return True


class MessageReader:
    """Reads messages from a socket; `crash_text` is everything that is not a message."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._rest = b""
        self.crash_text = ""
        self.ended = False

    def read(self) -> Iterator[WorkerMessage]:
        """Wait for messages and yield them; set `ended` when the other process has ended."""
        try:
            received = self._line.recv(1 << 16)
        except OSError:
            received = b""
        if not received:
            self.ended = True
            self.crash_text += self._rest.decode(errors="replace")
            return
        *lines, self._rest = (self._rest + received).split(b"\n")
        for text in lines:
            try:
                yield _decoder.decode(text)
            except msgspec.DecodeError:
                if len(self.crash_text) < _LONGEST_CRASH_TEXT:
                    self.crash_text += text.decode(errors="replace") + "\n"
