"""A worker process: runs the user's functions on the records of a training process.

It has a server of its own, on a port and with a key that only its parent knows. One thread runs
the server, one listens to the parent, and the main thread calls the user's functions. When the
parent says so, or has died, the worker processes what has arrived, closes the user's files and
ends, within its timeout.

Besides records, the two processes exchange messages: each is one line of JSON over a pair of
sockets. Other text on it is the traceback that the interpreter of a crashed worker writes there.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import itertools
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import msgspec

from tensortap.core.columns import Columns, merged
from tensortap.core.history import History, Key, record_nbytes
from tensortap.core.record import Record
from tensortap.live.address import Address
from tensortap.live.server import Server
from tensortap.values.registry import parts

TIME_UP = 75
"""Exit code of a worker that ran out of time."""

_REPORT_INTERVAL = 0.05  # seconds between reports of counts: each wakes a thread of the program


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


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker listens on a port."""

    port: int


class Fault(msgspec.Struct, frozen=True, tag=True):
    """The user's code raised an error for a name; sent once per error."""

    name: str
    text: str


class WorkerCounts(msgspec.Struct, frozen=True, tag=True):
    """Counts of processed records, dropped records, and records for which the code raised."""

    processed: int = 0
    errors: int = 0
    dropped: int = 0


class Done(msgspec.Struct, frozen=True, tag=True):
    """The worker ends; `error` is the traceback if it failed."""

    counts: WorkerCounts
    error: str = ""


class End(msgspec.Struct, frozen=True, tag=True):
    """No more records will come: finish within `timeout` seconds."""

    timeout: float


WorkerMessage = Ready | Fault | WorkerCounts | Done | End
_decoder = msgspec.json.Decoder(WorkerMessage)


def send(line: socket.socket, message: WorkerMessage) -> None:
    """Send a message, unless the other process has ended."""
    with contextlib.suppress(OSError):
        line.sendall(msgspec.json.encode(message) + b"\n")


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
                if len(self.crash_text) < 64 << 10:
                    self.crash_text += text.decode(errors="replace") + "\n"


class Inbox(History):
    """A history from which records are taken in the order of their arrival.

    A worker may be slower than its program. At most `per_name` records of a name wait, and at most
    `bound` bytes in all; beyond that the oldest record of the name, or of the most frequent name,
    is dropped.
    """

    def __init__(self, bound: int, per_name: int) -> None:
        super().__init__(bound)
        self.dropped = 0
        self._per_name = per_name
        self._woken = False
        self._arrivals = itertools.count()
        self._waiting: collections.OrderedDict[int, Record] = collections.OrderedDict()
        self._by_key: dict[Key, collections.deque[int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def write(self, records: Collection[Record]) -> None:
        """Add records; drop others if too many wait."""
        with self._changed:
            for record in records:
                key = (record.name, record.kind, record.rank)
                arrivals = self._by_key.setdefault(key, collections.deque())
                number = next(self._arrivals)
                self._waiting[number] = record
                arrivals.append(number)
                self.nbytes += record_nbytes(record)
                if len(arrivals) > self._per_name:
                    self._drop_oldest(arrivals)
                while self.nbytes > self.bound and len(self._waiting) > 1:
                    self._drop_oldest(max(self._by_key.values(), key=len))
            self.written += len(records)
            self._changed.notify_all()

    def write_columns(self, block: Iterable[Columns]) -> None:
        self.write(merged(block))

    def _drop_oldest(self, arrivals: collections.deque[int]) -> None:
        self.nbytes -= record_nbytes(self._waiting.pop(arrivals.popleft()))
        self.dropped += 1

    def take(self, timeout: float) -> Record | None:
        """Return the record that has waited longest; None after `timeout` seconds or a `wake`."""
        with self._changed:
            if not self._waiting and not self._woken:
                self._changed.wait(timeout)
            if not self._waiting:
                self._woken = False
                return None
            _, record = self._waiting.popitem(last=False)
            self._by_key[record.name, record.kind, record.rank].popleft()
            self.nbytes -= record_nbytes(record)
            return record

    def wake(self) -> None:
        """Make a waiting `take` return."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()


class TimeUp(BaseException):
    """Raised in the user's code when the time at the end is over."""


def report_crashes(line: socket.socket) -> None:
    """Write the traceback of a crash to the parent, which logs it.

    Disabling comes first: in a fork of a process that uses `faulthandler`, `enable` alone would
    leave the signal handlers as they are, even if a library has replaced them since.
    """
    faulthandler.disable()
    faulthandler.enable(line.fileno())


class WorkerProcess:
    """The main loop of a worker; `run` returns when the work is done."""

    def __init__(
        self, orders: Orders, line: socket.socket, load: Callable[[], tuple[Any, Any]]
    ) -> None:
        self._orders = orders
        self._line = line
        self._load = load
        self._inbox = Inbox(orders.bound, orders.per_name)
        self._server: Server | None = None
        self._processed = self._errors = 0
        self._faults: set[object] = set()
        self._in_user_code = False
        self._ending = threading.Event()
        self._end_at = 0.0
        self._time_is_up = False
        self._finished = threading.Event()

    def run(self) -> int:
        """Process records until the end; return the exit code."""
        self._set_up()
        listen = self._listen_to_parent
        threading.Thread(target=listen, name="tensortap-parent", daemon=True).start()
        error = ""
        recorder = on_close = None
        try:
            self._server = Server(Address("127.0.0.1", 0), self._inbox, self._orders.key)
            send(self._line, Ready(self._server.address.port))
            recorder, on_close = self._load()
            self._process_records(recorder)
        except TimeUp:
            pass
        except BaseException:
            error = traceback.format_exc()
        self._end(self._orders.timeout)
        self._close(getattr(recorder, "close", None), on_close)
        self._finished.set()
        send(self._line, Done(self._counts(), error))
        return 1 if error else 0

    def _set_up(self) -> None:
        report_crashes(self._line)
        os.nice(10)  # training has priority
        # processes that the user's code forks must not keep the line open after we have ended
        os.register_at_fork(after_in_child=self._line.close)
        # Ctrl-C reaches the whole process group; the parent decides what follows
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._end(self._orders.timeout))
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    # -- records -------------------------------------------------------------------------

    def _process_records(self, on_record: Callable[[Record], object]) -> None:
        reported, reported_at = self._counts(), time.monotonic()
        while not self._time_is_up:
            record = self._inbox.take(1.0 if self._counts() == reported else _REPORT_INTERVAL)
            if record is not None:
                self._process(on_record, record)
            if self._counts() != reported and time.monotonic() > reported_at + _REPORT_INTERVAL:
                reported, reported_at = self._counts(), time.monotonic()
                send(self._line, reported)
            if record is None and self._ending.is_set():
                self._stop_server()
                if not len(self._inbox):
                    return

    def _process(self, on_record: Callable[[Record], object], record: Record) -> None:
        self._in_user_code = True
        try:
            on_record(record)
            self._processed += 1
        except Exception as error:
            self._errors += 1
            self._report_fault(record.name, error)
        finally:
            self._in_user_code = False

    def _report_fault(self, name: str, error: Exception) -> None:
        """Send an error to the parent, unless one with the same traceback was sent before."""
        trace = error.__traceback__ and error.__traceback__.tb_next  # without our own frame
        key = type(error), "".join(traceback.format_tb(trace))
        if key not in self._faults and len(self._faults) < 1000:
            self._faults.add(key)
            text = "".join(traceback.format_exception(type(error), error, trace))
            send(self._line, Fault(name, text))

    def _counts(self) -> WorkerCounts:
        return WorkerCounts(self._processed, self._errors, self._inbox.dropped)

    # -- the end -------------------------------------------------------------------------

    def _close(self, *functions: Callable[[], object] | None) -> None:
        self._stop_server()
        for function in filter(None, functions):
            try:
                function()
            except Exception as error:
                self._report_fault("on_close", error)

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.close()

    def _end(self, timeout: float) -> None:
        """Finish within `timeout` seconds; later calls change nothing."""
        if not self._ending.is_set():
            self._end_at = time.monotonic() + timeout
            self._ending.set()
            self._inbox.wake()
            threading.Thread(
                target=self._enforce_timeout, args=(timeout,), name="tensortap-time", daemon=True
            ).start()

    def _enforce_timeout(self, timeout: float) -> None:
        if not self._finished.wait(timeout * 0.75):  # the rest is for closing files
            self._time_is_up = True
            # interrupt the user's code if it hangs, so that files can be closed
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        time.sleep(max(0.0, self._end_at - time.monotonic()))
        os._exit(TIME_UP)

    def _on_alarm(self, *_: object) -> None:
        if self._time_is_up and self._in_user_code:
            raise TimeUp

    # -- the parent ----------------------------------------------------------------------

    def _listen_to_parent(self) -> None:
        reader = MessageReader(self._line)
        poll = select.poll()  # not select(): a forked worker may have thousands of descriptors
        poll.register(self._line.fileno(), select.POLLIN)
        while not self._ending.is_set():
            for message in reader.read() if poll.poll(250) else ():
                if isinstance(message, End):
                    self._end(message.timeout)
                    return
            # the socket alone is not enough: another child of the parent may keep it open
            if reader.ended or os.getppid() != self._orders.parent_pid:
                self._wait_for_last_records()
                self._end(self._orders.timeout)

    def _wait_for_last_records(self) -> None:
        """Wait until the parent's connection, and with it everything it sent, has been read."""
        now = time.monotonic()
        end, pause = now + self._orders.timeout, min(1.0, self._orders.timeout / 4)
        deadline, received = now + pause, 0
        while time.monotonic() < min(deadline, end):
            server = self._server
            clients = [] if server is None else list(server.clients.values())
            if server is not None and not any(client.connected for client in clients):
                return
            before, received = received, sum(client.nbytes for client in clients)
            if received > before:
                deadline = time.monotonic() + pause
            time.sleep(0.01)


# -- the start of the process ------------------------------------------------------------


def spawned(line: int) -> None:
    """Run a worker in a fresh interpreter; its orders come over standard input."""
    orders = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Orders)
    sys.path[:] = orders.path
    # pickled by our own parent, over a pipe that it created
    _run(orders, socket.socket(fileno=line), lambda: pickle.loads(orders.functions))  # noqa: S301


def forked(
    orders: Orders, line: socket.socket, recorder: Any, on_close: Callable[[], object] | None
) -> None:
    """Run a worker in a fork of the training process."""
    report_crashes(line)  # first: what follows may crash in a fork
    signal.set_wakeup_fd(-1)  # it is the parent's
    for part in parts("tensortap.rooms.watch"):
        part.after_fork()
    _run(orders, line, lambda: (recorder, on_close))


def _run(orders: Orders, line: socket.socket, load: Callable[[], tuple[Any, Any]]) -> None:
    code = WorkerProcess(orders, line, load).run()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
