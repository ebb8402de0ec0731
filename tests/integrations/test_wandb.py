"""Runs of wandb that are written to disk, without network access."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from tensortap.core.errors import MissingExtra
from tensortap.core.record import Kind

pytestmark = pytest.mark.slow
BLOCK = 32768


def rows_of(folder):
    """Return the history in the .wandb file of a folder, which has LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    data = path.read_bytes()
    assert data.startswith(b":W&B")
    position, whole, rows = 7, b"", []
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:  # too short for a header
            position += left
            continue
        size = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]  # 1 whole record, 2 its first, 3 a middle, 4 its last fragment
        whole += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):
            record = Record.FromString(whole)
            whole = b""
            if record.HasField("history"):
                items = record.history.item
                rows.append({
                    "/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items
                })  # fmt: skip
    return rows


@pytest.fixture
def connections(monkeypatch):
    """Return the list of connections that anything tried to make to the network."""
    made = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen():
            while True:
                try:
                    connection, address = server.accept()
                except OSError:
                    return
                made.append((address, connection.recv(200)))
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, address)
        yield made
        server.shutdown(socket.SHUT_RDWR)


def test_offline(tracked, tmp_path, monkeypatch, connections):
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    folder = tracked.to_wandb(tmp_path, project="numbers")
    assert folder.parent == tmp_path / "wandb"
    initial, *rows = rows_of(folder)
    assert initial["step"] == -1
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["loss"] for row in rows] == tracked.metrics()["loss"].tolist()
    assert [row["half"] for row in rows] == [0, 0.5, 1, 1.5]
    frame = tracked.stats()
    weights = frame[(frame.kind == "Weight") & (frame.name == "0.weight") & (frame.step >= 0)]
    assert [row["Weight/rm2/0"] for row in rows] == weights.rm2.tolist()
    assert "Activation/rm2/0/call1" in rows[2]
    weight = tracked.reader.records("0.weight", step=0, kind=Kind.WEIGHT)[0]
    stats = weight.stats
    assert rows[0]["Weight/exponents/0/_type"] == "histogram"
    edges, counts = (rows[0][f"Weight/exponents/0/{key}"] for key in ("bins", "values"))
    assert len(edges) == len(counts) + 1
    counted = dict(zip(edges, counts, strict=False))
    assert {n: c for n, c in counted.items() if c} == stats.exponents
    assert abs(rows[0]["_timestamp"] - weight.time_ns / 1e9) < 1  # the time of capture
    assert connections == []
    assert not {"WANDB_ERROR_REPORTING", "WANDB_SERVICE"} & set(os.environ)


def test_open_run_of_the_user_continues(tracked, tmp_path):
    import wandb

    with wandb.init(mode="offline", dir=str(tmp_path), project="mine") as mine:
        mine.log({"x": 1})
        folder = tracked.to_wandb(tmp_path / "other", names="^loss$")
        mine.log({"x": 2})
        assert wandb.run is mine
    wandb.teardown()
    assert [row["x"] for row in rows_of(Path(mine.dir).parent)] == [1, 2]
    assert [row["step"] for row in rows_of(folder)] == [0, 1, 2, 3]


def test_reports_a_missing_library(tracked, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match="needs wandb: pip install wandb"):
        tracked.to_wandb(tmp_path)
