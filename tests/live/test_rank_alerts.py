"""A live session compares the ranks of a job that share nothing but the session."""

from __future__ import annotations

import signal
import socket

import pytest

import tensortap as tap
from tensortap import alerts
from tensortap.alerts import alert_of
from tensortap.api import session as live
from tensortap.record import Kind
from tests.processes import wait_for

_TORCH = """
    import torch, tensortap as tap
    from torch import nn
    from tensortap import alerts
    {init}
    rank = {rank}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    tap.catch(0, "hello").wait(60)
    with tap.track(model, optimizer=opt, alerts=[alerts.replicas(every=2)]) as tracker:
        for step in range(9):  # fewer than a straggler is behind
            model(torch.ones(3, 4)).sum().backward()
            for p in model.parameters():
                p.grad = torch.ones_like(p)  # as if all ranks had averaged them
            opt.step()
            if rank == 2 and step == 4:
                model[2].weight.data.view(torch.int32)[1, 3] ^= 1 << 20
            tracker.step(loss=1.0)
    assert tap.flush(60)
    tap.finish()
"""


def alerts_in(history):
    return [
        alert_of(record)
        for name in history.names()
        for record in history.records(name, kind=Kind.ALERT)
    ]


def test_a_flipped_bit_is_named_without_a_process_group(server, run):
    programs = [
        run(_TORCH.format(rank=rank, init=""), RANK=str(rank), WORLD_SIZE="3") for rank in range(3)
    ]
    for program in programs:
        program.end()
    wait_for(lambda: alerts_in(server.history))
    replicas = [alert for alert in alerts_in(server.history) if alert.rule == "replicas"]
    assert [(a.rank, a.name, a.step, a.facts["bit"]) for a in replicas] == [(2, "2.weight", 4, 20)]
    assert replicas[0].message == (
        "rank 2 has another 2.weight than the other 2 since step 4; "
        "1 of 16 elements differs: bit 20 of element [1, 3]"
    )
    assert {alert.rule for alert in alerts_in(server.history)} == {"replicas"}


def test_a_run_on_disk_tells_the_same(run, tmp_path):
    init = f"tap.init({str(tmp_path)!r})"
    programs = [
        run(_TORCH.format(rank=rank, init=init).replace('tap.catch(0, "hello").wait(60)', ""),
            RANK=str(rank), WORLD_SIZE="3", TENSORTAP_SERVER="127.0.0.1:1")
        for rank in range(3)
    ]  # fmt: skip
    for program in programs:
        program.end()
    (alert,) = tap.open(next(tmp_path.iterdir())).alerts()
    assert (alert.rule, alert.rank, alert.name, alert.step) == ("replicas", 2, "2.weight", 4)


_STEPS = """
    import sys, torch, tensortap as tap
    tap.catch(0, "hello").wait(60)
    print("there", flush=True)
    with tap.track(torch.nn.Linear(1, 1), weights=False) as tracker:
        for line in sys.stdin:
            tracker.step(loss=0.5)
"""


def test_a_rank_that_is_killed_or_stopped(run):
    """Both go silent; a stopped one that goes on is behind."""
    rules = [alerts.silent(seconds=8), alerts.straggler(behind=10)]
    server = live.start("127.0.0.1", 0, "64MB", rules=rules)
    found = lambda rule: {a.rank for a in alerts_in(server.history) if a.rule == rule}
    arrived = lambda: len(server.history.records("loss"))

    def step(ranks, until):
        # together, as collectives make ranks do: one that gets less time than others is not late
        before = arrived()
        for each in ranks:
            each.say()
        wait_for(lambda: arrived() == before + len(ranks))
        return until()

    try:
        ranks = [run(_STEPS, server, RANK=str(rank), WORLD_SIZE="5") for rank in range(5)]
        assert [each.line() for each in ranks] == ["there"] * 5
        wait_for(lambda: step(ranks, lambda: arrived() > 100))
        assert found("silent") == set()
        ranks[3].kill()
        ranks[4].signal(signal.SIGSTOP)
        wait_for(lambda: step(ranks[:3], lambda: found("silent") == {3, 4}))
        ranks[4].signal(signal.SIGCONT)
        left = (*ranks[:3], ranks[4])
        wait_for(lambda: step(left, lambda: found("straggler") == {4}))
        for program in left:
            program.end()
        assert {a.rank for a in alerts_in(server.history)} == {3, 4}
    finally:
        server.close()


_JAX = """
    import jax
    jax.distributed.initialize("127.0.0.1:{port}", num_processes=2, process_id={rank})
    import jax.numpy as jnp, numpy as np, tensortap as tap
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from tensortap import alerts
    rank = {rank}
    mesh = Mesh(np.array(jax.devices()), ("dp",))
    whole, split = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("dp",)))
    tap.catch(0, "hello").wait(60)
    def params(step):
        local = np.arange(12, dtype=np.float32).reshape(3, 4) + step
        if rank == 1 and step >= 4:
            local[2, 1] = -local[2, 1]
        place = jax.make_array_from_process_local_data
        return {{"global": place(whole, local), "own": jnp.ones(3) * rank,
                "sharded": place(split, local + rank), "same": jnp.ones(3) * step}}
    with tap.track(model_state=params(0), alerts=[alerts.replicas(every=2)]) as tracker:
        for step in range(8):
            tracker.step(params(step))
    assert tap.flush(60)
"""


def test_processes_of_jax(server, run):
    pytest.importorskip("jax")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    programs = [run(_JAX.format(rank=rank, port=port), fresh=True) for rank in range(2)]
    for program in programs:
        program.end()
    wait_for(lambda: alerts_in(server.history))
    (alert,) = alerts_in(server.history)
    assert (alert.rule, alert.name, alert.kind, alert.step) == (
        "replicas", "global", Kind.WEIGHT, 4
    )  # fmt: skip
    assert alert.message == (
        "global differs between rank 0 and rank 1 since step 4, without a majority; "
        "1 of 12 elements differs: bit 31 of element [2, 1]"
    )
