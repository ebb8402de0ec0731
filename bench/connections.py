"""Rows on live sessions with many connections: how time and memory grow from 16 on."""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection

from bench.harness import Row
from bench.processes import process

SMALLEST, LARGER = 16, (64, 256, 1024)
PROCESSES = 4
ROUNDS = 20  # records that each connection sends


def crowd(pipe: Connection, address: str, first: int, count: int) -> None:
    """Open connections at the same time; on request, send a record on each and await them all."""
    import zmq

    from tensortap.core.record import Kind, Record
    from tensortap.live import keys
    from tensortap.live import messages as wire
    from tensortap.live.address import parse_address

    key, context = keys.find_key(), zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(count)]

    def receive(kind: type) -> None:
        for socket in sockets:
            while not isinstance(wire.read_header(*socket.recv_multipart()[:2]), kind):
                pass

    pipe.recv()
    for rank, socket in enumerate(sockets, first):
        socket.curve_serverkey, _ = keys.curve_pair(key, "server")
        socket.curve_publickey, socket.curve_secretkey = keys.curve_pair(key, "client")
        socket.connect(parse_address(address).endpoint)
        client = wire.Client(rank.to_bytes(16, "big"), rank=rank, program="bench")
        socket.send_multipart(wire.message(wire.HELLO, wire.hello("source", client)))
    receive(wire.Welcome)
    pipe.send(True)
    number = 0
    while pipe.recv():
        number += 1
        for rank, socket in enumerate(sockets, first):
            loss = Record("loss", Kind.METRIC, number, 0, number, rank, 1, time.time_ns(),
                          value=0.5)  # fmt: skip
            body = wire.encode_records([loss])
            header = wire.Batch(number, len(body), 0)
            socket.send_multipart([*wire.message(wire.RECORDS, header), body])
        receive(wire.Ack)
        pipe.send(True)


def session(pipe: Connection) -> None:
    """Run a live session; on request, send its memory, records, clients and rejections."""
    import psutil

    from tensortap.api import session as live

    server = live.start("127.0.0.1", 0, "1GB")
    pipe.send(str(server.address))
    own = psutil.Process()
    while True:
        pipe.recv()
        counts = server.history.written, len(server.clients), sum(server.rejected.values())
        pipe.send((own.memory_info().rss, *counts))


def _asked(pipes: list[Connection]) -> float:
    """Ask all processes at the same time; return the seconds until the last answer."""
    start = time.perf_counter()
    for pipe in pipes:
        pipe.send(True)
    for pipe in pipes:
        pipe.recv()
    return time.perf_counter() - start


def _measured(count: int) -> dict[str, float]:
    with process(session) as server, contextlib.ExitStack() as stack:
        address, each = server.recv(), count // PROCESSES
        server.send(True)
        before = server.recv()[0]
        pipes = [
            stack.enter_context(process(crowd, address, n * each, each)) for n in range(PROCESSES)
        ]
        connect = _asked(pipes)
        step = sorted(_asked(pipes) for _ in range(ROUNDS))[ROUNDS // 2]
        server.send(True)
        after, written, clients, rejected = server.recv()
        assert (written, clients) == (count * ROUNDS, count)
        return {"connect": connect, "step": step, "MB": (after - before) / 1e6,
                "rejected": rejected}  # fmt: skip


def many_connections() -> list[Row]:
    base = _measured(SMALLEST)
    rows = []
    for count in LARGER:
        found = _measured(count)
        note = ", ".join(f"{k} {v:.3g}" for k, v in found.items())
        note += f" (s); {SMALLEST}: " + ", ".join(f"{k} {v:.3g}" for k, v in base.items())
        name = f"a record of each of {count:,} connections ÷ of {SMALLEST}"
        rows.append(Row(name, None, True, [found["step"]], [base["step"]], note=note))
    return rows


ROWS = [many_connections]
