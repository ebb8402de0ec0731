"""A server that speaks S3, for tests of runs on object storage."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests.processes import wait_for


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
        fsspec.filesystem("s3").clear_instance_cache()  # a client knows the address of its server
        server.kill()
        server.wait()
