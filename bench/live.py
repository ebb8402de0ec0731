"""Rows on the live path."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench.harness import Row, in_turns, time_of
from bench.peers import echo, process, pull, session, stopwatch, swallow

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
    from tensortap.sources.catch import catch

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
    from tensortap.pipeline.pipeline import pipeline as here

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


def large() -> list[Row]:
    import numpy as np
    import torch

    import tensortap as tap

    with process(session, "512MB") as pipe:
        _connect(pipe.recv())
        tensor = torch.rand(MIB64 // 4)
        source, warm = tensor.numpy(), np.empty(MIB64 // 4, np.float32)
        warm[:] = 0

        def ours() -> float:
            taken = time_of(lambda: tap.catch(tensor, "big"))
            tap.flush()
            return taken

        for _ in range(20):
            ours()

        def base() -> float:
            return time_of(lambda: np.copyto(warm, source))

        def naive() -> float:
            return time_of(lambda: tensor.clone().numpy().tobytes())

        a, b, c = in_turns(31, ours, base, naive)
        naive_ratio = sorted(c)[15] / sorted(b)[15]
        return [
            Row("catch of 64 MiB ÷ memcpy into a warm buffer", 1.5, True, a, b, naive=naive_ratio)
        ]


def cold() -> list[Row]:
    """Measure what users meet: default settings, and nothing warm but the compared copy."""
    import numpy as np

    import tensortap as tap

    rows = []
    with process(session, "50%") as pipe:
        os.environ["TENSORTAP_SERVER"] = pipe.recv()
        assert tap.catch(0.0, "hello").wait(10), tap.receipt()
        for mib in (1, 16, 64):
            source = np.random.default_rng(0).random(mib << 17)
            warm = source.copy()
            ours, base = [], []
            for _ in range(20):
                base.append(time_of(lambda: np.copyto(warm, source)))  # noqa: B023
                ours.append(time_of(lambda: tap.catch(source, f"{mib} MiB")))  # noqa: B023
            assert tap.flush(60)
            name = f"first 20 catches of {mib} MiB, default settings ÷ memcpy into a warm buffer"
            rows.append(Row(name, 1.5, True, ours, base))
    return rows


TIMES = 16


def _throughput(
    address: str, tensor: torch.Tensor, base: Callable[[], object], path: str
) -> tuple[list[float], list[float]]:
    """Return bytes per second of our delivery of a tensor, and of another one."""
    import tensortap as tap

    _connect(address, buffer="300MB", overflow="block")

    def ours() -> object:
        for _ in range(TIMES):
            tap.catch(tensor, "big")
        assert tap.flush(60)

    def per_second(deliver: Callable[[], object]) -> Callable[[], float]:
        return lambda: TIMES * MIB64 / time_of(deliver)

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

    tensor = torch.rand(MIB64 // 4)
    raw = memoryview(tensor.numpy()).cast("B")
    with process(session, "512MB") as pipe, process(swallow, MIB64, TIMES) as bare:
        a, b = _throughput(pipe.recv(), tensor, _raw_socket(bare.recv(), raw), "shared memory")
    return [Row("64 MiB delivered, one host ÷ raw socket", 1.0, False, a, b, unit="B/s")]


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
        Row(f"{name} raw socket, not encrypted", 0.6, False, a, b, unit="B/s"),
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
            Row("torch loop, 20 catches per step ÷ the loop alone", 1.08, True, a, b, note=note)
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
    p99 = int(0.99 * len(delays))
    middle = delays[len(delays) // 2] / trips[len(trips) // 2]
    note = f"p50 ratio {middle:.1f}, p99 {delays[p99] * 1e6:.0f} µs"
    name = "time from catch until get sees it ÷ pyzmq ping-pong, p99"
    return [Row(name, 10, True, [delays[p99]], [trips[p99]], note=note)]


ROWS = (
    skipped,
    scalar,
    large,
    cold,
    throughput_arena,
    throughput_tcp,
    small,
    training_loop,
    latency,
)
