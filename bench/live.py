"""Rows on the live path."""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from bench.harness import Row, in_turns, time_of
from bench.processes import echo, process, pull, session, stopwatch, swallow

if TYPE_CHECKING:
    import torch

MIB64 = 64 << 20


def _connect(address: str, *, buffer: str = "2GB", overflow: str = "latest") -> None:
    """Connect the pipeline of this process to a server and wait until it answers."""
    os.environ.update(
        TENSORTAP_SERVER=address, TENSORTAP_BUFFER=buffer, TENSORTAP_OVERFLOW=overflow
    )
    import tensortap as tap

    assert tap.catch(0.0, "hello").wait(10), tap.receipt()


def _empty(value, name=None, *, every=1, first=None, when=True, changed=False, server=None):
    pass


def skipped() -> list[Row]:
    import tensortap as tap
    from tensortap.capture.catch import catch

    rows = []
    with process(session, "256MB") as pipe:
        _connect(pipe.recv())
        value, n = object(), 1 << 40
        catch(1.0, "skip", every=n)

        def ours() -> float:
            return time_of(lambda: [catch(value, "skip", every=n) for _ in range(1000)]) / 1000

        def base() -> float:
            return time_of(lambda: [_empty(value, "skip", every=n) for _ in range(1000)]) / 1000

        def unnamed() -> float:
            return time_of(lambda: [catch(value, every=n) for _ in range(1000)]) / 1000

        def unnamed_base() -> float:
            return time_of(lambda: [_empty(value, every=n) for _ in range(1000)]) / 1000

        a, b, c, d = in_turns(101, ours, base, unnamed, unnamed_base)
        rows.append(Row("skipped catch, named ÷ empty call", 6, True, a, b))
        rows.append(Row("skipped catch, unnamed ÷ empty call", 12, True, c, d))
    # the server is dead now: same process, nobody listening
    deadline = time.monotonic() + 20
    from tensortap.capture.pipeline import pipeline as here

    while here.on and time.monotonic() < deadline:
        tap.catch(0.0, "hello")
        time.sleep(0.05)
    assert not here.on

    def unheard() -> float:
        return time_of(lambda: [catch(value, "skip2") for _ in range(1000)]) / 1000

    def unheard_base() -> float:
        return time_of(lambda: [_empty(value, "skip2") for _ in range(1000)]) / 1000

    a, b = in_turns(101, unheard, unheard_base)
    rows.append(Row("catch with no server ÷ empty call", 8, True, a, b))
    return rows


def scalar() -> list[Row]:
    import numpy as np
    import torch

    import tensortap as tap

    rows = []
    with process(session, "256MB") as pipe:
        _connect(pipe.recv())
        loss, plain, one = torch.tensor(0.25), 0.25, np.float32(0.25)

        def ours(value: object) -> float:
            taken = time_of(lambda: [tap.catch(value, "loss") for _ in range(100)]) / 100
            tap.flush()
            return taken

        def base() -> float:
            return time_of(lambda: [np.copy(one) for _ in range(1000)]) / 1000

        def naive() -> float:
            return time_of(lambda: [loss.detach().clone().numpy() for _ in range(100)]) / 100

        a, p, b, c = in_turns(101, lambda: ours(loss), lambda: ours(plain), base, naive)
        ratio = sorted(c)[50] / sorted(b)[50]
        rows.append(
            Row("catch of a torch scalar ÷ numpy.copy of a scalar", 12, True, a, b, naive=ratio)
        )
        rows.append(Row("catch of a Python float ÷ numpy.copy of a scalar", 12, True, p, b))
    return rows


SIZES = {
    "4 KiB": 4 << 10,
    "64 KiB": 64 << 10,
    "1 MiB": 1 << 20,
    "16 MiB": 16 << 20,
    "64 MiB": MIB64,
    "512 MiB": 512 << 20,
}


def produce(pipe: Connection, address: str, nbytes: int) -> None:
    """Catch values of one size, first cold and then steady, beside copies into a warm buffer."""
    import numpy as np

    import tensortap as tap

    os.environ["TENSORTAP_SERVER"] = address
    source = np.random.default_rng(0).random(nbytes // 8)
    warm = source.copy()

    def ours() -> float:
        return time_of(lambda: tap.catch(source, "value"))

    def base() -> float:
        return time_of(lambda: np.copyto(warm, source))

    def settled() -> float:
        assert tap.flush(60)
        return ours()

    base()
    assert tap.catch(0.0, "hello").wait(10), tap.receipt()
    cold = [(ours(), base()) for _ in range(50 if nbytes <= MIB64 else 5)]
    dropped = tap.receipt().dropped
    steady = in_turns(31 if nbytes <= MIB64 else 7, settled, base)
    pipe.send((*zip(*cold, strict=True), *steady, dropped))


def sizes() -> list[Row]:
    """Measure what users meet, with default settings: the first catches, and those that follow."""
    rows = []
    for size, nbytes in SIZES.items():
        with (
            process(session, "50%") as server,
            process(produce, server.recv(), nbytes) as producer,
        ):
            cold, cold_base, steady, base, dropped = producer.recv()
        # below 1 MiB a copy takes less than the call
        limit = 1.5 if nbytes >= 1 << 20 else math.inf
        first = f"first {len(cold)} catches of {size}, no pause ÷ memcpy into a warm buffer"
        note = f"{dropped} dropped: over budget" if dropped else ""
        rows.append(Row(first, limit, True, list(cold), list(cold_base), note=note, cold_row=True))
        name = f"catch of {size} ÷ memcpy into a warm buffer"
        rows.append(Row(name, limit, True, steady, base, cold_row=True))
    return rows


TIMES = 16


def _throughput(
    address: str, tensor: torch.Tensor, base: Callable[[], object], path: str, pause: float = 0.0
) -> tuple[list[float], list[float]]:
    """Return bytes per second of our delivery of a tensor, and of another one.

    The pause before each of them keeps what a session does afterwards out of the other's time.
    """
    import tensortap as tap

    _connect(address, buffer="300MB", overflow="block")

    def ours() -> object:
        for _ in range(TIMES):
            tap.catch(tensor, "big")
        assert tap.flush(60)

    def per_second(deliver: Callable[[], object]) -> Callable[[], float]:
        def measure() -> float:
            time.sleep(pause)
            return TIMES * tensor.nbytes / time_of(deliver)

        return measure

    a, b = in_turns(9, per_second(ours), per_second(base))
    dropped = tap.receipt().dropped
    assert not dropped, f"{dropped} dropped"
    assert path in str(tap.receipt()), tap.receipt()
    return a, b


def _raw_socket(port: int, raw: memoryview) -> Callable[[], object]:
    client = socket.create_connection(("127.0.0.1", port))

    def deliver() -> None:
        for _ in range(TIMES):
            client.sendall(raw)
        client.recv(1)

    return deliver


def throughput_arena() -> list[Row]:
    import torch

    rows = []
    with process(session, "512MB") as server:
        address = server.recv()
        for mib in (1, 16, 64):
            tensor = torch.rand(mib << 18)
            raw = memoryview(tensor.numpy()).cast("B")
            with process(swallow, tensor.nbytes, TIMES) as bare:
                base = _raw_socket(bare.recv(), raw)
                for pause in (0.1, 0.0) if mib == 1 else (0.0,):
                    a, b = _throughput(address, tensor, base, "shared memory", pause)
                    how = f", {TIMES} at a time with pauses" if pause else ""
                    name = f"{mib} MiB delivered, one host{how} ÷ raw socket"
                    rows.append(Row(name, 1.0, False, a, b, "B/s"))
    return rows


def deliver(pipe: Connection, address: str) -> None:
    """Deliver 16 MiB values whenever asked, and send how many bytes per second arrived."""
    import numpy as np

    import tensortap as tap

    _connect(address, buffer="300MB", overflow="block")
    source = np.random.default_rng(0).random(2 << 20)
    pipe.send(None)
    while True:
        pipe.recv()
        start = time.perf_counter()
        for _ in range(TIMES):
            tap.catch(source, "big")
        assert tap.flush(60)
        pipe.send(TIMES * source.nbytes / (time.perf_counter() - start))


def four_producers() -> list[Row]:
    with process(session, "512MB") as server, contextlib.ExitStack() as stack:
        address = server.recv()
        pipes = [stack.enter_context(process(deliver, address)) for _ in range(4)]
        for pipe in pipes:
            pipe.recv()

        def together(pipes: list[Connection]) -> float:
            for pipe in pipes:
                pipe.send(None)
            return sum(pipe.recv() for pipe in pipes)

        a, b = in_turns(9, lambda: together(pipes), lambda: together(pipes[:1]))
    return [Row("16 MiB delivered by four producers ÷ by one", 0.8, False, a, b, "B/s")]


def memory_of_the_producer() -> list[Row]:
    """Measure the memory of a training process that catches as fast as it can for 30 s."""
    import numpy as np
    import psutil

    import tensortap as tap
    from tensortap.core.settings import memory_limit

    with process(session, "50%") as server:
        os.environ["TENSORTAP_SERVER"] = server.recv()
        source = np.random.default_rng(0).random(MIB64 // 8)
        assert tap.catch(0.0, "hello").wait(10), tap.receipt()
        own = psutil.Process()
        before, largest = own.memory_info().rss, 0
        end = time.monotonic() + 30
        while time.monotonic() < end:
            tap.catch(source, "value")
            largest = max(largest, own.memory_info().rss - before)
    name = "memory of the training process, 30 s of 64 MiB catches ÷ its limit"
    note = f"{largest >> 20} MiB at most"
    return [Row(name, 1.0, True, [largest], [memory_limit()], "B", note=note)]


def throughput_tcp() -> list[Row]:
    import torch
    import zmq

    os.environ["TENSORTAP_NO_ARENA"] = "1"
    tensor = torch.rand(MIB64 // 4)
    raw = memoryview(tensor.numpy()).cast("B")
    chunks = [raw[start : start + (1 << 20)] for start in range(0, MIB64, 1 << 20)]
    pair = zmq.curve_keypair()
    with (
        process(session, "512MB") as pipe,
        process(swallow, MIB64, TIMES) as bare,
        process(pull, pair) as encrypted,
    ):
        address = pipe.recv()
        a, b = _throughput(address, tensor, _raw_socket(bare.recv(), raw), "TCP")
        context = zmq.Context()
        push = context.socket(zmq.PUSH)
        push.sndhwm = 0
        push.curve_serverkey = pair[0]
        push.curve_publickey, push.curve_secretkey = zmq.curve_keypair()
        push.connect(f"tcp://127.0.0.1:{encrypted.recv()}")

        def base() -> None:
            encrypted.send(TIMES * len(chunks))
            for _ in range(TIMES):
                for chunk in chunks:
                    push.send(chunk, copy=False)
            encrypted.recv()

        c, d = _throughput(address, tensor, base, "TCP")
        context.destroy(linger=0)
    name = "64 MiB delivered over TCP, encrypted ÷"
    return [
        Row(f"{name} raw socket, not encrypted", 0.8, False, a, b, unit="B/s"),
        Row(f"{name} bare pyzmq, encrypted", 0.6, False, c, d, unit="B/s"),
    ]


def small() -> list[Row]:
    import numpy as np
    import zmq

    import tensortap as tap

    count = 50_000
    with process(session, "256MB") as pipe, process(pull) as bare:
        _connect(pipe.recv())
        array = np.arange(16, dtype=np.float32)
        context = zmq.Context()
        push = context.socket(zmq.PUSH)
        push.sndhwm = 0
        push.connect(f"tcp://127.0.0.1:{bare.recv()}")
        payload = array.tobytes()

        def ours() -> float:
            start = time.perf_counter()
            for _ in range(count):
                tap.catch(array, "small")
            assert tap.flush(60)
            return count / (time.perf_counter() - start)

        def base() -> float:
            bare.send(count)
            start = time.perf_counter()
            for _ in range(count):
                push.send(payload)
            bare.recv()
            return count / (time.perf_counter() - start)

        a, b = in_turns(9, ours, base)
        assert not tap.receipt().dropped
        context.destroy(linger=0)
    return [
        Row(
            "small records delivered ÷ pyzmq PUSH/PULL with one message per record",
            0.5,
            False,
            a,
            b,
            "/s",
        )
    ]


def training_loop() -> list[Row]:
    import torch

    import tensortap as tap

    torch.manual_seed(0)
    with process(session, "512MB") as pipe:
        _connect(pipe.recv())
        layers = [torch.nn.Linear(64, 64) for _ in range(20)]
        model = torch.nn.ModuleList(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        data = torch.randn(32, 64)

        def step(catch: bool) -> None:
            hidden = data
            for layer in layers:
                hidden = torch.relu(layer(hidden))
                if catch:
                    tap.catch(hidden, "hidden")
            loss = hidden.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        def ours() -> float:
            return time_of(lambda: step(True), 20)

        def base() -> float:
            return time_of(lambda: step(False), 20)

        a, b = in_turns(31, ours, base)
        note = f"20 catches of 8 KiB per step of {sorted(b)[15] * 1e3:.2f} ms"
        return [
            Row("torch loop, 20 catches per step ÷ the loop alone", 1.05, True, a, b, note=note)
        ]


def latency() -> list[Row]:
    import zmq

    import tensortap as tap

    count = 1000
    with process(stopwatch, count) as pipe, process(echo) as bare:
        os.environ["TENSORTAP_SERVER"] = pipe.recv()
        context = zmq.Context()
        request = context.socket(zmq.REQ)
        request.connect(f"tcp://127.0.0.1:{bare.recv()}")
        random.seed(0)
        trips = []
        for _ in range(count):
            tap.catch(time.perf_counter(), "tick")
            time.sleep(random.uniform(0.005, 0.02))
            start = time.perf_counter()
            request.send(b"ping")
            request.recv()
            trips.append(time.perf_counter() - start)
            time.sleep(0.002)
        delays = sorted(pipe.recv()[20:])
        pipe.send(True)
        context.destroy(linger=0)
    trips = sorted(trips[20:])
    rows = []
    for share, limit in ((0.5, 10), (0.99, 10)):
        ours, base = (times[int(share * len(times))] for times in (delays, trips))
        name = f"time from catch until get sees it ÷ pyzmq ping-pong, p{share * 100:.0f}"
        rows.append(Row(name, limit, True, [ours], [base], note=f"{ours * 1e6:.0f} µs"))
    return rows


ROWS = (
    skipped,
    scalar,
    sizes,
    throughput_arena,
    throughput_tcp,
    four_producers,
    memory_of_the_producer,
    small,
    training_loop,
    latency,
)
