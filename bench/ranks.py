"""Rows on jobs of several ranks: replicas that are compared while a GPT trains under DDP."""

from __future__ import annotations

import os
import socket
import time
from multiprocessing.connection import Connection

from bench.harness import Row
from bench.processes import process
from bench.runs import _no_server

_ROUNDS, _STEPS = 7, 10


def _rank(pipe: Connection, rank: int, port: int) -> None:
    """Train in turns with and without the check, and send the seconds per step of both."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    import torch
    from torch import distributed

    import tensortap as tap
    from bench.gpt import Training
    from tensortap import alerts

    _no_server()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    training = Training(batch=4)
    training.model = torch.nn.parallel.DistributedDataParallel(training.model)
    off = dict.fromkeys(("activations", "gradients", "weights", "optimizer_state"), False)

    def measure(tracked: bool) -> float:
        distributed.barrier()
        rules = [alerts.replicas(every=10)] if tracked else False
        tracker = tap.track(training.model, training.optimizer, alerts=rules, **off)
        with tracker:
            start = time.perf_counter()
            for _ in range(_STEPS):
                training.step()
                if tracked:
                    tracker.step()
            took = (time.perf_counter() - start) / _STEPS
        assert not tracker.alerts, tracker.alerts
        return took

    measure(True)
    found = [(measure(True), measure(False)) for _ in range(_ROUNDS)]
    assert not tap.receipt().reasons["error"]
    pipe.send(found)
    pipe.recv()


def replicas() -> list[Row]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with process(_rank, 0, port) as first, process(_rank, 1, port):
        ours, base = map(list, zip(*first.recv(), strict=True))
    note = f"digests of 9.0 million parameters and their state, steps of {min(base) * 1e3:.0f} ms"
    name = "GPT under DDP with 2 ranks, replicas compared every 10 steps ÷ not"
    return [Row(name, 1.01, True, ours, base, note=note)]


ROWS = (replicas,)
