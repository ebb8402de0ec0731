"""Other processes that measurements need: live sessions, sockets, ping-pong."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

_spawn = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def process(target: Any, *args: Any) -> Iterator[Connection]:
    """Run `target(pipe, *args)` in a separate process until the block ends."""
    here, there = _spawn.Pipe()
    child = _spawn.Process(target=target, args=(there, *args), daemon=True)
    child.start()
    try:
        yield here
    finally:
        child.kill()
        child.join()


def session(pipe: Connection, memory: str) -> None:
    """Run a live session that sends its address, then its number of records on request."""
    from tensortap.api import session as live

    server = live.start("127.0.0.1", 0, memory)
    pipe.send(str(server.address))
    while True:
        count = pipe.recv()
        pipe.send(server.history.wait(count, 120) and server.history.written)


def stopwatch(pipe: Connection, count: int) -> None:
    """Run a live session that notes when `get` first sees each of `count` values named "tick"."""
    from tensortap.api import session as live

    server = live.start("127.0.0.1", 0, "1GB")
    live._session = live.Session(server)
    pipe.send(str(server.address))
    delays = []
    for number in range(count):
        server.history.wait(number + 1, 60)
        sent = live.get("tick")
        delays.append(time.perf_counter() - sent)
    pipe.send(delays)
    pipe.recv()


def swallow(pipe: Connection, nbytes: int, times: int) -> None:
    """Receive from a bare socket into one warm buffer."""
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    buffer = memoryview(bytearray(os.urandom(1 << 16) * (nbytes >> 16)))
    connection, _ = listener.accept()
    while True:
        for _ in range(times):
            got = 0
            while got < nbytes:
                more = connection.recv_into(buffer[got:])
                if not more:
                    return
                got += more
        connection.sendall(b"k")


def pull(pipe: Connection, pair: tuple[bytes, bytes] | None = None) -> None:
    """Count messages on a bare pyzmq PULL socket, encrypted with a pair of CURVE keys."""
    import zmq

    context = zmq.Context()
    receiver = context.socket(zmq.PULL)
    receiver.rcvhwm = 0
    if pair is not None:
        receiver.curve_server = True
        receiver.curve_publickey, receiver.curve_secretkey = pair
    port = receiver.bind_to_random_port("tcp://127.0.0.1")
    pipe.send(port)
    while True:
        for _ in range(pipe.recv()):
            receiver.recv(copy=False)
        pipe.send(True)


def echo(pipe: Connection) -> None:
    """Echo messages on a bare pyzmq REP socket."""
    import zmq

    context = zmq.Context()
    replier = context.socket(zmq.REP)
    pipe.send(replier.bind_to_random_port("tcp://127.0.0.1"))
    while True:
        replier.send(replier.recv())


def measure(pipe: Connection, module: str, name: str) -> None:
    """Run one measurement and send its rows."""
    pipe.send(getattr(importlib.import_module(module), name)())
