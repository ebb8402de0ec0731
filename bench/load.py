"""Rows under load: 200 producers in 20 processes on one session, some of them in trouble."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection

from bench.harness import Row
from bench.processes import process
from bench.relay import relay

PAUSE = 0.1  # seconds between two values of a producer
# bytes of a value, and how many in a hundred have this size
SIZES = {64: 60, 8 << 10: 25, 256 << 10: 13, 4 << 20: 2}
SLOW = 1 << 20  # bytes per second through the slow relay, about a tenth of what is produced


LOAD = "200 producers: "  # the names of rows begin like this


@dataclasses.dataclass
class Load:
    """What one load was, and what was measured under it."""

    processes: int
    producers: int  # of each process
    seconds: float
    bound: int = 512 << 20  # of the session
    stop: float = 10.0  # seconds that a producer, and later the session, stands still
    confirmed: int = 0
    lost: int = 0  # of those that were confirmed
    dropped: int = 0  # by producers with a connection of their own
    dropped_slow: int = 0  # by those behind the relay
    confirmed_slow: int = 0
    held: int = 0  # bytes that the session holds in the end
    grown: float = 0.0  # memory of the session, compared with that after a quarter of the load
    producer_grown: float = 0.0  # the same of the process of producers that grew most
    producer_memory: str = ""  # of each process, after a quarter of the load and in the end
    get_times: list[float] = dataclasses.field(default_factory=list)
    longest: float = 0.0  # catch
    longest_stopped: float = 0.0  # while the session is stopped


def producers(pipe: Connection, address: str, first: int, count: int, slow: bool) -> None:
    """Run producers with a connection each; send what was confirmed and what it cost."""
    import numpy as np
    import psutil

    from tensortap.capture.ledger import Ledger
    from tensortap.capture.queue import Queue, admit, write_to
    from tensortap.core.buffers import Pool
    from tensortap.core.record import Kind, Record
    from tensortap.live.address import parse_address
    from tensortap.live.sink import LiveSink
    from tensortap.values import snapshot

    values = {nbytes: np.zeros(nbytes, np.uint8) for nbytes in SIZES}
    ended = threading.Event()
    confirmed: dict[bytes, int] = {}
    dropped, longest = [], [0.0]

    def produce(producer: int) -> None:
        chance = random.Random(producer)
        pool, ledger = Pool(16 << 20), Ledger()
        sink = LiveSink(parse_address(address), pool, ledger, arena=not slow)
        queue = Queue(sink, budget=32 << 20, name="load")
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
        assert queue.flush(0.5 if slow else 60) or slow
        queue.close(0.5)
        confirmed[sink.id] = sum(ticket.wait(0) for ticket in tickets)
        dropped.append(sum(ledger.reasons().values()))

    threads = [threading.Thread(target=produce, args=(first + i,)) for i in range(count)]
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
    pipe.send((confirmed, sum(dropped)))


def loaded_session(pipe: Connection, bound: str) -> None:
    """Run a live session; whenever asked, send how long `get` took since, and what it holds."""
    import psutil

    from tensortap.api import session as live
    from tensortap.core.errors import NotFound

    server = live.start("127.0.0.1", 0, bound)
    live._session = live.Session(server)
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
        written = {name: client.records for name, client in list(server.clients.items())}
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


def measure(load: Load) -> Load:
    """Put a session under load and note what happened.

    One process of producers is behind a slow relay, one is stopped for a while, and one is killed;
    then the session is stopped for a while.
    """
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(process(loaded_session, str(load.bound)))
        address, server_pid = session.recv()
        road = stack.enter_context(process(relay, address, SLOW)).recv()
        crowd = [
            stack.enter_context(
                process(producers, road if n == 1 else address, n * load.producers, load.producers,
                        n == 1)
            )
            for n in range(load.processes)
        ]  # fmt: skip
        pids = [pipe.recv() for pipe in crowd]
        time.sleep(load.seconds / 4)  # the history is full now
        _, server_before, _, _ = _ask(session)
        before = [_ask(pipe) for pipe in crowd]
        with stopped(pids[0]):
            time.sleep(load.stop)
        os.kill(pids.pop(), signal.SIGKILL)
        crowd.pop()
        time.sleep(load.seconds / 2)
        load.get_times, load.held, _, _ = _ask(session)
        after = [_ask(pipe) for pipe in crowd]
        with stopped(server_pid):
            time.sleep(load.stop)
        load.longest_stopped = max(_ask(pipe)[1] for pipe in crowd)
        time.sleep(load.seconds / 8)
        for pipe in crowd:
            pipe.send("end")
        ends = [pipe.recv() for pipe in crowd]
        _, _, written, rejected = _ask(session)
    assert not rejected, rejected
    confirmed = {name: count for counts, _ in ends for name, count in counts.items()}
    load.confirmed = sum(confirmed.values())
    load.lost = sum(max(0, count - written.get(name, 0)) for name, count in confirmed.items())
    load.confirmed_slow, load.dropped_slow = sum(ends[1][0].values()), ends[1][1]
    load.dropped = sum(dropped for _, dropped in ends) - load.dropped_slow
    load.grown = load.held / server_before
    memory = [(b[0], a[0]) for a, b in zip(after, before, strict=False)]
    load.producer_grown = max(late / early for early, late in memory)
    alike = collections.Counter(f"{early >> 20}-{late >> 20}" for early, late in memory)
    load.producer_memory = ", ".join(f"{count} × {each}" for each, count in alike.items())
    load.longest = max(longest for _, longest in after)
    return load


def load(seconds: float = 180) -> list[Row]:
    found = measure(Load(processes=20, producers=10, seconds=seconds))
    times = found.get_times
    return [
        Row(f"{LOAD}confirmed values lost ÷ confirmed", 0, True,
            [found.lost], [found.confirmed], "",
            note=f"{found.confirmed:,} confirmed, {found.dropped:,} dropped: over budget; "
            f"through the slow relay {found.confirmed_slow:,} and {found.dropped_slow:,}"),
        Row(f"{LOAD}`get`, p99 ÷ 50 ms", 1, True, [times[int(0.99 * len(times))]], [0.05]),
        Row(f"{LOAD}memory of the session in the end ÷ its bound", 1.5, True,
            [float(found.held)], [float(found.bound)], "B"),
        Row(f"{LOAD}the same ÷ after a quarter of the load", 1.1, True, [found.grown], [1.0], ""),
        Row(f"{LOAD}memory of a producer in the end ÷ after a quarter of the load", 1.1, True,
            [found.producer_grown], [1.0], "",
            note=f"the one that grew most; MiB of each: {found.producer_memory}"),
        Row(f"{LOAD}longest catch while the session is stopped ÷ before", 2, True,
            [found.longest_stopped], [found.longest],
            note=f"{found.longest_stopped * 1e3:.0f} ms, {found.processes} processes"),
    ]  # fmt: skip


def table(rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table of the load; none without its rows."""
    found = [row for row in rows if row.name.startswith(LOAD)]
    lines = ["| What | Ratio | Target | Note |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row.name.removeprefix(LOAD)} | {row.ratio:.2g} | {row.limit:g} | {row.note} |"
        for row in found
    ]
    return lines if found else []


def _ask(pipe: Connection) -> tuple:
    pipe.send("report")
    return pipe.recv()


ROWS = (load,)
