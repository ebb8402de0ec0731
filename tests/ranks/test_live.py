"""A live session compares the ranks of a job while their records arrive, and so does a run."""

from __future__ import annotations

import json
import signal
import socket

import numpy as np
import pytest

import tensortap as tap
from tensortap.alerts import alert_of
from tensortap.api import session as live
from tensortap.core.record import Kind, Record
from tensortap.rooms.ranks import findings as rank_findings
from tensortap.rooms.ranks import watch as rank_watch
from tensortap.stats import summarize_array
from tests.commands import type_in
from tests.processes import wait_for

pytestmark = pytest.mark.slow

_TRAINING = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model = nn.parallel.DistributedDataParallel(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
if "RUNS" in os.environ:
    tap.init(os.environ["RUNS"])
torch.manual_seed(rank)
with tap.track(model, optimizer=opt, digests=True) as tracker:
    for step in range(int(os.environ.get("STEPS", "9"))):
        opt.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        opt.step()
        if rank == 2 and step == 4 and "WRONG" in os.environ:
            # one bit of one element
            model.module[2].weight.data.view(torch.int32)[1, 3] ^= 1
        tracker.step(loss=1.0)
assert tap.flush(60)
tap.finish()
result = [str(alert) for alert in tracker.alerts]
"""
_MESSAGE = "rank 2 has another 2.weight (Weight) than the other 2 since step 4"


def alerts_in(history):
    return [
        alert_of(record)
        for name in history.names()
        for record in history.records(name, kind=Kind.ALERT)
    ]


def test_a_session_names_the_rank_of_ddp_with_another_weight(server, gloo):
    gloo(_TRAINING, world=3, TENSORTAP_SERVER=str(server.address), WRONG="1")
    wait_for(lambda: alerts_in(server.history))
    (alert,) = alerts_in(server.history)
    assert (alert.rule, alert.rank, alert.name, alert.kind) == (
        "replicas", 2, "2.weight", Kind.WEIGHT
    )  # fmt: skip
    assert (alert.step, alert.module, alert.message) == (4, "2", _MESSAGE)


def test_a_run_on_disk_tells_the_same(gloo, tmp_path):
    gloo(_TRAINING, world=3, RUNS=str(tmp_path), WRONG="1")
    (path,) = tmp_path.iterdir()
    run = tap.open(path)
    (finding,) = run.ranks()
    assert (finding.rule, finding.ranks, finding.name) == ("replicas", (2,), "2.weight")
    assert (finding.module, finding.step, finding.last_step) == ("2", 4, 8)
    assert [alert.message for alert in run.alerts()] == [_MESSAGE]
    code, printed, _ = type_in("ranks", path)
    assert code == 1
    assert _MESSAGE in printed
    (stored,) = json.loads(type_in("ranks", path, "--json")[1])["findings"]
    assert (stored["ranks"], stored["step"]) == ([2], 4)


_STEPS = """
    import sys, torch, tensortap as tap
    tap.catch(0, "hello").wait(60)
    print("there", flush=True)
    with tap.track(torch.nn.Linear(1, 1), kind=("activation", "gradient")) as tracker:
        for line in sys.stdin:
            tracker.step(loss=0.5)
"""


def test_a_rank_that_is_killed_or_stopped(run, monkeypatch):
    """Both are behind, and reported once; a stopped one that goes on is so until it catches up."""
    monkeypatch.setattr(rank_findings, "_LATE_SECONDS", 3.0)
    server = live.start("127.0.0.1", 0, "64MB")
    found = lambda: sorted(a.rank for a in alerts_in(server.history) if a.rule == "behind")
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
        wait_for(lambda: step(ranks, lambda: arrived() > 20))
        assert found() == []
        ranks[3].kill()
        ranks[4].signal(signal.SIGSTOP)
        wait_for(lambda: step(ranks[:3], lambda: found() == [3, 4]))
        ranks[4].signal(signal.SIGCONT)
        left = (*ranks[:3], ranks[4])
        before = arrived()
        wait_for(lambda: step(left, lambda: arrived() > before + 40))
        for program in left:
            program.end()
        assert found() == [3, 4]
    finally:
        server.close()


def test_old_records_leave_and_a_finding_is_reported_once(server, run, monkeypatch):
    """The table of the session is bounded: it starts over while a rank stays far."""
    monkeypatch.setattr(rank_watch, "_MOST_RECORDS", 400)
    stats = [summarize_array(np.full(4, size, "f4")) for size in (1.0, 1.01, 0.99, 5.0)]
    program = run("import tensortap as tap, sys; tap.catch(0, 'x').wait(60); print(); input()",
                  RANK="1", WORLD_SIZE="8")  # fmt: skip
    program.line()
    server.history.write([])
    watch, alerts = rank_watch.RankWatch(server), []
    for first in range(0, 200, 10):
        server.history.write([
            Record("x", Kind.ACTIVATION, step, 0, step, rank, 8, step, dtype="float32", shape=(4,),
                   stats=stats[3 if rank == 6 and step > 20 else rank % 3])
            for step in range(first, first + 10) for rank in range(8)
        ])  # fmt: skip
        alerts += [a for a in watch.poll() if a.rule == "outlier"]
        assert watch._table is not None
        assert len(watch._table) <= 400
    assert [(alert.rank, alert.step) for alert in alerts] == [(6, 21)]
    program.say()
    program.end()


_JAX = """
    import jax
    jax.distributed.initialize("127.0.0.1:{port}", num_processes=2, process_id={rank})
    import jax.numpy as jnp, numpy as np, tensortap as tap
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    rank = {rank}
    mesh = Mesh(np.array(jax.devices()), ("dp",))
    whole, split = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("dp",)))
    tap.catch(0, "hello").wait(60)
    def params(step):
        local = np.arange(12, dtype=np.float32).reshape(3, 4) + step
        if rank == 1 and step >= 4:
            local[2, 1] = -local[2, 1]
        place = jax.make_array_from_process_local_data
        return {{"global": place(whole, local), "own": jnp.arange(3.0) + rank,
                "sharded": place(split, local + rank), "same": jnp.arange(3.0) * step}}
    with tap.track(params(0)) as tracker:
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
