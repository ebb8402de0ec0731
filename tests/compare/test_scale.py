"""Compare on object storage, and with many records."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
import pytest

from tensortap.core.errors import TensortapError
from tensortap.rooms.compare.runs import compare_runs
from tests.commands import type_in
from tests.compact.test_storage import cluster
from tests.processes import wait_for
from tests.storage import storage

pytestmark = pytest.mark.slow
assert storage


def records(change=None, count=200):
    rng = np.random.default_rng(0)
    found = []
    for step in range(count):
        x = rng.standard_normal(6000).astype("f4")
        found.append(("x", "Value", step, x + 1 if step == change else x * np.float32(1 + 1e-7)))
    return found


@pytest.fixture
def runs(write):
    return write(records()), write(records(change=120))


def check(report):
    assert [d.key.step for d in report.differences] == [120]
    assert report.compared == 200


@pytest.mark.filterwarnings("ignore")  # of the client library
def test_runs_on_object_storage(runs, storage):
    import tensortap as tap

    for name, run in zip(("a", "b"), runs, strict=True):
        storage.put(str(run), f"bucket/{name}", recursive=True)
    check(compare_runs("s3://bucket/a", "s3://bucket/b"))
    check(compare_runs("s3://bucket/a", runs[1]))
    opened = tap.open("s3://bucket/a")
    assert opened.get("x", step=3).shape == (6000,)
    folder = opened.path
    assert folder.exists()
    del opened
    assert not folder.exists()
    with pytest.raises(TensortapError):
        tap.open("s3://bucket/none")
    with pytest.raises(TensortapError, match="cannot be opened"):
        tap.open("nosuch://bucket/none")


def test_thousands_of_records_of_four_ranks(write):
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(8).astype("f4") for _ in range(100)]

    def many(change):
        return [
            (f"n{i % 100}", "Value", i // 100, values[i % 100] + change * (i == 1777), rank)
            for rank in range(4)
            for i in range(2_000)
        ]

    one, two = write(many(0)), write(many(1))
    report = compare_runs(one, two)
    assert report.compared == 8_000
    assert [(d.key.rank, d.key.step) for d in report.differences] == [(r, 17) for r in range(4)]


@pytest.fixture
def compacted(tmp_path, monkeypatch):
    """Two compacted runs of eight ranks, one with a rank that differs, in many small tasks."""
    import tensortap as tap
    from bench.scale_runs import write_run
    from tensortap.rooms.compact import compact
    from tensortap.rooms.compare import tasks

    monkeypatch.setattr(compact, "ROW_GROUP", 64)
    monkeypatch.setattr(tasks, "_ROWS", 50)
    runs = [write_run(tmp_path / name, 8, 20, 12, clean=name == "b") for name in "ab"]
    plain = compare_runs(*runs).to_json()
    for run in runs:
        assert tap.open(run).compact() > 1
    return runs, {**plain, "provenance": {}}


def test_compacted_runs_compare_as_others(compacted):
    from tensortap.rooms.compare import tasks
    from tensortap.rooms.compare.compared_run import ComparedRun

    (a, b), plain = compacted
    found = compare_runs(a, b)
    assert {**found.to_json(), "provenance": {}} == plain
    assert (len(found.differences), found.ranks) == (8 * 12, (3,))
    sides = ComparedRun(a), ComparedRun(b)
    task = tasks.CompareTask((str(a), str(b)), tasks.Choice(), tasks.Tolerance(), tasks.RuleSet())
    assert len(tasks.split(sides, task)) > 10
    few = {"names": r"attn\.wv", "steps": (11, 14), "kinds": ["Weight_Gradient"]}
    assert len(compare_runs(a, b, **few).differences) == 6
    assert compare_runs(a, a)  # also where replicas disagree


class Slow(Executor):
    """An executor whose tasks take longer."""

    def __init__(self, executor):
        self.executor = executor

    def map(self, function, tasks):
        return self.executor.map(lambda task: (time.sleep(0.2), function(task))[1], tasks)


@pytest.mark.parametrize("workers", [2, 4])
def test_dask_gives_the_same_though_a_worker_is_killed(compacted, tmp_path, workers):
    (a, b), plain = compacted
    with cluster(workers, tmp_path) as (started, client), ThreadPoolExecutor(1) as pool:
        found = pool.submit(compare_runs, a, b, executor=Slow(client.get_executor()))
        wait_for(lambda: any(client.processing().values()))
        busy = next(address for address, tasks in client.processing().items() if tasks)
        killed = next(each.pid for each in started.workers.values() if each.worker_address == busy)
        os.kill(killed, signal.SIGKILL)
        assert {**found.result(timeout=200).to_json(), "provenance": {}} == plain
        if workers == 2:
            address = started.scheduler_address
            code, out, said = type_in("compare", a, b, "--json", "--dask", address)
            assert code == 1, said
            assert {**json.loads(out), "provenance": {}} == plain
