"""Compacted runs on object storage: few requests, and workers of Dask."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import urllib.request

import pandas as pd
import pytest

import tensortap as tap
from tests.compact.test_compact import check_same, frame, plain, run, small_windows
from tests.processes import wait_for

pytestmark = pytest.mark.slow
assert run
assert plain
assert small_windows


@pytest.fixture
def storage(monkeypatch):
    """A server that speaks S3, on this machine, and its client."""
    import fsspec

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:

        def answers():
            assert server.poll() is None
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/moto-api/", timeout=60).close()
                return True

        wait_for(answers)
        for name, value in (("ACCESS_KEY_ID", "testing"), ("SECRET_ACCESS_KEY", "testing"),
                            ("DEFAULT_REGION", "us-east-1"), ("ENDPOINT_URL", url)):  # fmt: skip
            monkeypatch.setenv(f"AWS_{name}", value)
        fsspec.filesystem("s3").clear_instance_cache()
        files = fsspec.filesystem("s3")
        files.mkdir("bucket")
        yield files
    finally:
        server.kill()
        server.wait()


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
    from tensortap.rooms.figures.figures import heatmap_figure

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
