"""Compacted runs on object storage: few requests, and workers of Dask."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Executor, ThreadPoolExecutor
from types import SimpleNamespace

import pandas as pd
import pyarrow.parquet as pq
import pytest

import tensortap as tap
from tests.compact.test_compact import check_same, frame, plain, run, small_windows
from tests.page.conftest import logged_in
from tests.processes import wait_for
from tests.storage import storage

pytestmark = pytest.mark.slow
assert run
assert plain
assert small_windows
assert storage


@pytest.fixture
def requests(monkeypatch):
    """Return a list of the requests that the client sends, with the bytes that each returns."""
    import aiobotocore.client

    sent = []
    call = aiobotocore.client.AioBaseClient._make_api_call

    async def counted(self, operation, arguments):
        answer = await call(self, operation, arguments)
        key = arguments.get("Key", arguments.get("Prefix", ""))
        sent.append((operation, key, answer.get("ContentLength", 0)))
        return answer

    monkeypatch.setattr(aiobotocore.client.AioBaseClient, "_make_api_call", counted)
    return sent


@pytest.mark.filterwarnings("ignore")  # of the client library
def test_few_requests_for_the_first_heatmap(run, plain, storage, requests):
    from tensortap.rooms.figures.figures.heatmap import heatmap_figure

    storage.put(str(run), "bucket/run", recursive=True)
    where = "s3://bucket/run"
    assert tap.open(where).compact() == 4
    del requests[:]
    opened = tap.open(where)
    heatmap_figure(opened.table().whole(), kind="Activation", metric="rm2")
    assert len(requests) <= 15, requests
    keys = [key for operation, key, _ in requests if operation == "GetObject"]
    assert not [key for key in keys if key.endswith("records.parquet") or "/tensors/" in key]
    needed = [f"bucket/{key}" for key in keys if key.endswith(("manifest.json", "whole.parquet"))]
    sizes = sum(storage.size(key) for key in (*needed, "bucket/run/run.json"))
    received = sum(nbytes for operation, _, nbytes in requests if operation == "GetObject")
    assert received == sizes < storage.du("bucket/run") / 2
    for rank in (None, "all"):
        one, other = (frame(tap.open(each).stats(rank=rank)) for each in (plain, where))
        pd.testing.assert_frame_equal(one, other, check_exact=True)
    assert tap.open(where).get("loss", step=3, rank=1) == tap.open(plain).get(
        "loss", step=3, rank=1
    )
    shutil.rmtree(opened.path, ignore_errors=True)


def test_view_of_a_url(run, storage):
    tap.open(run).compact()
    storage.put(str(run), "bucket/run", recursive=True)
    command = [sys.executable, "-m", "tensortap", "view", "s3://bucket/run", "--no-browser"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as view:
        try:
            lines = iter(view.stdout.readline, "")
            found = next(found for line in lines if (found := re.search(r"http://\S+", line)))
            page = SimpleNamespace(
                url=found[0], address=found[0].partition("/?")[0].partition("/#")[0]
            )
            with logged_in(page) as client:
                (entry,) = client.get("/api/catalog").json()["entries"]
                assert entry["where"] == "s3://bucket/run"
                figure = client.get(
                    "/api/overview", params={"run": entry["id"], "kind": "Activation"}
                )
                assert figure.status_code == 200
                assert figure.json()["data"]
        finally:
            view.kill()


@contextlib.contextmanager
def cluster(workers, folder):
    """Start a scheduler and processes of Dask, and yield a client."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        workers, threads_per_worker=1, processes=True, dashboard_address=None,
        local_directory=str(folder),
    ) as started, distributed.Client(started) as client:  # fmt: skip
        yield started, client


class Slow(Executor):
    """An executor whose windows take a second, when they are half written."""

    def __init__(self, executor):
        self.executor = executor

    def map(self, function, jobs):
        def slowly(job):
            import time

            from tensortap.rooms.compact import rows

            rolled_up = rows.rolled_up
            rows.rolled_up = lambda found: (time.sleep(1), rolled_up(found))[1]
            try:
                return function(job)
            finally:
                rows.rolled_up = rolled_up

        return self.executor.map(slowly, jobs)


@pytest.mark.parametrize("workers", [2, 4])
def test_dask_with_a_worker_that_is_killed_in_the_middle(run, plain, workers, tmp_path):
    alone = shutil.copytree(plain, tmp_path / "alone")
    tap.open(alone).compact()
    with cluster(workers, tmp_path) as (started, client), ThreadPoolExecutor(1) as pool:
        windows = pool.submit(tap.open(run).compact, Slow(client.get_executor()))
        wait_for(lambda: list((run / "compact").glob(".*/*.parquet")))  # a draft is being written
        busy = next(address for address, tasks in client.processing().items() if tasks)
        killed = next(each.pid for each in started.workers.values() if each.worker_address == busy)
        os.kill(killed, signal.SIGKILL)
        assert windows.result(timeout=100) == 4
    check_same(run, plain)
    for file in alone.glob("compact/*/*.parquet"):
        assert pq.read_table(file).equals(pq.read_table(run / file.relative_to(alone)))


@pytest.mark.filterwarnings("ignore")  # of the client library
def test_dask_on_object_storage(run, plain, storage, tmp_path):
    storage.put(str(run), "bucket/run", recursive=True)
    with cluster(2, tmp_path) as (started, _):
        command = [sys.executable, "-m", "tensortap", "compact", "s3://bucket/run", "--dask"]
        subprocess.run([*command, started.scheduler_address], check=True)
    assert tap.open("s3://bucket/run").reader.windows
    one, other = (frame(tap.open(each).stats(rank="all")) for each in (plain, "s3://bucket/run"))
    pd.testing.assert_frame_equal(one, other, check_exact=True)
