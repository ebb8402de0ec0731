"""Rows under load: 200 producers in 20 processes on one session, some of them in trouble."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from bench.harness import Row
from bench.processes import process

PROCESSES, PRODUCERS = 20, 10
SECONDS = 180
PAUSE = 0.1  # seconds between two values of a producer
# bytes of a value, and how many in a hundred have this size
SIZES = {64: 60, 8 << 10: 25, 256 << 10: 13, 4 << 20: 2}
STOPPED = 10  # seconds that a producer, and later the session, stands still


def producers(pipe: Connection, address: str, number: int) -> None:
    """Run ten producers with a connection each; send what was confirmed and what it cost."""
    import numpy as np
    import psutil

    from tensortap.buffers import Pool
    from tensortap.frameworks import snapshot
    from tensortap.pipeline.ledger import Ledger
    from tensortap.pipeline.queue import Queue, admit, write_to
    from tensortap.record import Kind, Record
    from tensortap.sinks.live import LiveSink
    from tensortap.wire.address import parse_address

    values = {nbytes: np.zeros(nbytes, np.uint8) for nbytes in SIZES}
    ended = threading.Event()
    confirmed, dropped, longest = [], [], [0.0]

    def produce(producer: int) -> None:
        chance = random.Random(producer)
        pool, ledger = Pool(16 << 20), Ledger()
        queue = Queue(LiveSink(parse_address(address), pool, ledger), budget=32 << 20, name="load")
        tickets, step = [], 0
        while not ended.wait(PAUSE * chance.uniform(0.5, 1.5)):
            [nbytes] = chance.choices(list(SIZES), list(SIZES.values()))
            start = time.perf_counter()
            if admit([queue], nbytes, f"{nbytes} bytes", Kind.VALUE, step, producer):
                value, _ = snapshot(values[nbytes], pool)
                record = Record(f"{nbytes} bytes", Kind.VALUE, step, 0, step, producer, 200,
                                time.time_ns(), "numpy.ndarray", "uint8", (nbytes,), None, None,
                                value)  # fmt: skip
                tickets.append(write_to([queue], record, nbytes))
            longest[0] = max(longest[0], time.perf_counter() - start)
            step += 1
        assert queue.flush(60)
        confirmed.append(sum(ticket.wait(0) for ticket in tickets))
        dropped.append(sum(ledger.reasons().values()))
        queue.close()

    threads = [
        threading.Thread(target=produce, args=(PRODUCERS * number + i,)) for i in range(PRODUCERS)
    ]
    for thread in threads:
        thread.start()
    own = psutil.Process()
    pipe.send(own.pid)
    while pipe.recv() == "report":
        pipe.send((own.memory_info().rss, longest[0]))
        longest[0] = 0.0
    ended.set()
    for thread in threads:
        thread.join()
    pipe.send((sum(confirmed), sum(dropped)))


def loaded_session(pipe: Connection, bound: str) -> None:
    """Run a live session; whenever asked, send how long `get` took since, and what it holds."""
    import psutil

    from tensortap.api import session as live
    from tensortap.errors import NotFound

    server = live._server = live.start("127.0.0.1", 0, bound)
    own = psutil.Process()
    pipe.send((str(server.address), own.pid))
    while True:
        times = []
        while not pipe.poll(0.02):
            start = time.perf_counter()
            with contextlib.suppress(NotFound):  # nothing has arrived yet
                live.get(f"{random.choice(list(SIZES))} bytes")
            times.append(time.perf_counter() - start)
        pipe.recv()
        written = sum(client.records for client in server.clients.values())
        memory = own.memory_full_info().uss  # without the producers' memory that it reads
        pipe.send((sorted(times), memory, written, dict(server.rejected)))


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def load() -> list[Row]:
    bound = 512 << 20
    with process(loaded_session, str(bound)) as session, contextlib.ExitStack() as stack:
        address, server_pid = session.recv()
        crowd = [stack.enter_context(process(producers, address, n)) for n in range(PROCESSES)]
        pids = [pipe.recv() for pipe in crowd]
        time.sleep(SECONDS / 4)  # the history is full now
        _, server_before, _, _ = _ask(session)
        reports = [_ask(pipe) for pipe in crowd]
        with stopped(pids[0]):
            time.sleep(STOPPED)
        os.kill(pids.pop(), signal.SIGKILL)
        crowd.pop()
        time.sleep(SECONDS / 2)
        times, server_after, _, _ = _ask(session)
        after = [_ask(pipe) for pipe in crowd]
        with stopped(server_pid):
            time.sleep(STOPPED)
        blocked = max(_ask(pipe)[1] for pipe in crowd)
        time.sleep(SECONDS / 8)
        for pipe in crowd:
            pipe.send("end")
        confirmed, dropped = (
            sum(counts) for counts in zip(*[p.recv() for p in crowd], strict=True)
        )
        _, _, written, rejected = _ask(session)
    assert written >= confirmed, f"{confirmed} confirmed, {written} arrived"
    assert not rejected, rejected
    growth = [a[0] / b[0] for a, b in zip(after, reports, strict=False)]
    before = max(longest for _, longest in after)
    p99 = times[int(0.99 * len(times))]
    note = f"{confirmed} values confirmed, none lost; {dropped} dropped: over budget"
    return [
        Row("get under the load of 200 producers, p99 ÷ 50 ms", 1, True, [p99], [0.05], note=note),
        Row("memory of the session at the end of the load ÷ its bound", 1.5, True,
            [float(server_after)], [float(bound)], "B"),
        Row("memory of the session, after the load ÷ after a quarter of it", 1.1, True,
            [float(server_after)], [float(server_before)], "B"),
        Row("memory of a producer, after the load ÷ after a quarter of it", 1.1, True,
            [max(growth)], [1.0], "", note="the one that grew most"),
        Row("longest catch while the session is stopped ÷ before", 2, True, [blocked], [before],
            note=f"{blocked * 1e3:.0f} ms, {PROCESSES} processes on this machine"),
    ]  # fmt: skip


def _ask(pipe: Connection) -> tuple:
    pipe.send("report")
    return pipe.recv()


ROWS = (load,)
