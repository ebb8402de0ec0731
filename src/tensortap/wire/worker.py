"""What a training process and a worker of its own say to each other besides records.

They speak over a pair of sockets that only they hold: a line of JSON a message. A line that is
none is the last words of a worker that crashed: its interpreter writes them there itself.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import ClassVar

import msgspec


class Orders(msgspec.Struct, frozen=True):
    """What a worker is told when it starts.

    `functions` is the pickle of what it is to call; `main` is where the program's main module
    lies (a path, or a module's name), if the pickle needs it.
    """

    name: str
    key: bytes
    parent: int
    timeout: float
    bound: int
    each: int
    functions: bytes = b""
    main: str = ""
    main_is_module: bool = False
    path: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    folder: str = ""


class Counts(msgspec.Struct, frozen=True):
    """What has become of the records that arrived."""

    processed: int = 0
    failed: int = 0
    replaced: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker listens."""

    port: int


class Fault(msgspec.Struct, frozen=True, tag=True):
    """The user's code raised under a name; said once a name and class of error."""

    name: str
    text: str


UNASKED = -1
TIME_UP = 75  # the exit code of a worker that had to leave before it was done


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to an `Ask`, or `UNASKED`."""

    number: int
    counts: Counts


class Done(msgspec.Struct, frozen=True, tag=True):
    """The worker has finished and leaves; `words` is why, if it had to, `left` what it left."""

    counts: Counts
    words: str = ""
    left: int = 0


class Ask(msgspec.Struct, frozen=True, tag=True):
    """What has become of everything so far? `drained`: answer when it has been processed."""

    number: int
    drained: bool = False


class End(msgspec.Struct, frozen=True, tag=True):
    """Nothing more will come: finish within `timeout` seconds."""

    timeout: float


_ANY = msgspec.json.Decoder(Ready | Fault | Answer | Done | Ask | End)
Message = Ready | Fault | Answer | Done | Ask | End


def send(line: socket.socket, message: Message) -> bool:
    """Say something; False when nobody is there any more."""
    try:
        line.sendall(msgspec.json.encode(message) + b"\n")
    except OSError:
        return False
    return True


class Lines:
    """The messages that come over a socket; `words` is what was no message."""

    LONGEST: ClassVar[int] = 64 << 10  # of last words

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._rest = b""
        self.words = ""
        self.ended = False

    def read(self) -> Iterator[Message]:
        """Wait for something, and give the messages in it; `ended` when the other side has gone."""
        try:
            found = self._line.recv(1 << 16)
        except OSError:
            found = b""
        if not found:
            self.ended = True
            self.words += self._rest.decode(errors="replace")
            return
        *lines, self._rest = (self._rest + found).split(b"\n")
        for text in lines:
            try:
                yield _ANY.decode(text)
            except msgspec.DecodeError:
                if len(self.words) < self.LONGEST:
                    self.words += text.decode(errors="replace") + "\n"


class MainIsRead(BaseException):
    """Ends the import of a program's main module in a worker: what it needs is defined by now."""


_reading_main = False


def read_main(reading: bool) -> None:
    """Say that this process is a worker that imports the program's main module, or no more."""
    global _reading_main
    _reading_main = reading


def leave_main() -> None:
    """Called where training begins: a worker that only wants the functions goes no further.

    A script without ``if __name__ == "__main__"`` would train a second time, in the worker.
    """
    if _reading_main:
        raise MainIsRead
