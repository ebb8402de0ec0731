"""Compacted runs on object storage: few requests, and workers of Dask."""

from __future__ import annotations

import shutil
import subprocess

import pandas as pd
import pytest

import tensortap as tap
from tests.compact.test_compact import check_same, frame, plain, run, small_windows
from tests.storage import storage

pytestmark = pytest.mark.slow
assert run
assert plain
assert small_windows
assert storage


@pytest.fixture
def requests(monkeypatch):
    """Return a list of the requests that the client sends."""
    import aiobotocore.client

    sent = []
    call = aiobotocore.client.AioBaseClient._make_api_call

    async def counted(self, operation, arguments):
        sent.append((operation, arguments.get("Key", arguments.get("Prefix", ""))))
        return await call(self, operation, arguments)

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
    assert not [key for _, key in requests if key.endswith("records.parquet") or "/tensors/" in key]
    for rank in (None, "all"):
        one, other = (frame(tap.open(each).stats(rank=rank)) for each in (plain, where))
        pd.testing.assert_frame_equal(one, other, check_exact=True)
    assert tap.open(where).get("loss", step=3, rank=1) == tap.open(plain).get(
        "loss", step=3, rank=1
    )
    shutil.rmtree(opened.path, ignore_errors=True)


@pytest.mark.parametrize("workers", [2, 4])
def test_dask_with_a_worker_that_is_killed(run, plain, workers, tmp_path):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        workers, threads_per_worker=1, processes=True, dashboard_address=None,
        local_directory=str(tmp_path),
    ) as cluster, distributed.Client(cluster) as client:  # fmt: skip
        killed = next(iter(cluster.workers.values())).pid
        subprocess.run(["kill", "-9", str(killed)], check=True)
        windows = tap.open(run).compact(client.get_executor())
    assert windows == 4
    check_same(run, plain)
