"""The store sink: deduplication, visibility, full disks and ranks."""

from __future__ import annotations

import math
import os
import resource
import signal

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

import tensortap as tap
from tensortap.capture.queue import Queue, write_to
from tensortap.core.buffers import Pool
from tensortap.core.record import Kind, Record, TensorData
from tensortap.rooms.track.batches import summarize_many
from tensortap.runs.folders import make_run
from tensortap.runs.run_reader import RunReader
from tensortap.runs.sink import StoreSink
from tensortap.stats.columns import RecordColumns
from tensortap.stats.summarize import code_of
from tensortap.values import digest, rebuild
from tests.capture.sink_contract import SinkContract, put, record
from tests.processes import wait_for


def open_queue(path, *, budget=1 << 28, **options) -> Queue:
    sink = StoreSink(make_run(path, 1), 0, **options)
    return Queue(sink, budget=budget, overflow="newest", name="test")


def everything(path) -> list[Record]:
    reader = RunReader(path)
    return [reader.load(head) for head in reader.new_records()]


class TestContract(SinkContract):
    @pytest.fixture
    def queue(self, tmp_path):
        queue = open_queue(tmp_path)
        yield queue
        queue.close(60)

    def arrived(self, queue):
        return everything(queue.sink.run)


@pytest.mark.parametrize("durable", [False, True])
def test_durable_syncs_payload_then_row_before_flush_returns(tmp_path, monkeypatch, durable):
    synced = []
    real = os.fsync

    def fsync(fd):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    queue = open_queue(tmp_path, durable=durable)
    put(queue, large(0, 1.0, pool=Pool()))
    assert queue.flush(60)
    found = list(synced)
    queue.close(60)
    if not durable:
        assert synced == []
        return
    payload = next(i for i, name in enumerate(found) if "000000.safetensors" in name)
    row = max(i for i, name in enumerate(found) if name.startswith("tail.arrows"))
    assert payload < row
    assert any(name.startswith("0000.parquet") for name in synced[len(found) :])


def large(seq: int, fill: float, name: str = "w", pool: Pool | None = None) -> Record:
    array = np.full(20_000, fill, np.float32)
    data = array.tobytes() if pool is None else pool.acquire(array.nbytes)
    if pool is not None:
        data.writable[:] = array.tobytes()
    tensor = TensorData("numpy", "float32", array.shape, data)
    return Record(
        name, Kind.VALUE, seq, 0, seq, 0, 1, seq, "", "float32", array.shape, value=tensor
    )


def test_stores_equal_payloads_once(tmp_path):
    queue, pool = open_queue(tmp_path), Pool()
    for seq, fill in enumerate([1, 1, 2, 1, 2, 2]):
        put(queue, large(seq, fill, pool=pool))
    put(queue, large(6, 1, name="another", pool=pool))
    queue.close(60)
    run = queue.sink.run
    table = RunReader(run).table(["payloads", "digest"]).to_pylist()
    places = [row["payloads"][0]["key"] for row in table]
    assert places[0] == places[1] == places[3]
    assert places[2] == places[4] == places[5]
    assert len(set(places)) == 3
    stored = []
    for path in run.glob("tensors/*/*.safetensors"):
        with safe_open(path, "np") as file:
            stored += [key for key in file.keys() if not key.startswith("__pad")]  # noqa: SIM118
    assert sorted(stored) == sorted(set(places))
    assert [rebuild(r.value)[0] for r in everything(run)] == [1, 1, 2, 1, 2, 2, 1]
    assert table[0]["digest"] == digest(large(0, 1).value)


@pytest.fixture
def small_disk():
    """A limit on the size of files, as a disk that is full, and that has room again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(nbytes: int | None) -> None:
        soft = before[0] if nbytes is None else nbytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, old)


@pytest.mark.slow
@pytest.mark.fault("disk full")
def test_retries_until_a_full_disk_has_room(tmp_path, small_disk, monkeypatch, caplog):
    monkeypatch.setattr("tensortap.runs.sink._RETRY", 0.05)
    queue, pool = open_queue(tmp_path), Pool()
    assert put(queue, large(0, 0.0, pool=pool)).wait(60)
    small_disk(100_000)
    tickets = [put(queue, large(seq, float(seq), pool=pool)) for seq in range(1, 8)]
    wait_for(lambda: queue.sink.failing)
    assert not queue.flush(0.2)
    assert "File too large" in queue.sink.failing
    assert RunReader(queue.sink.run).truncated == {}
    assert sum("cannot write" in r.message for r in caplog.records) == 1
    small_disk(None)
    assert queue.flush(60)
    assert all(ticket.wait(0) for ticket in tickets)
    assert not queue.sink.failing
    assert [rebuild(r.value)[0] for r in everything(queue.sink.run)] == [float(i) for i in range(8)]
    queue.close(60)


@pytest.mark.fault("disk full")
def test_run_names_values_that_were_dropped_over_budget(tmp_path, small_disk, monkeypatch):
    monkeypatch.setattr("tensortap.runs.sink._RETRY", 0.05)
    queue, pool = open_queue(tmp_path, budget=200_000), Pool()
    assert put(queue, large(0, 0.0, pool=pool)).wait(60)
    small_disk(1)
    tickets = [put(queue, large(seq, float(seq), pool=pool), 80_000) for seq in range(1, 9)]
    dropped = [step for step, ticket in enumerate(tickets, 1) if ticket is None]
    assert 1 <= len(dropped) < 8
    small_disk(None)
    assert queue.flush(60)
    queue.close(60)
    reader = RunReader(queue.sink.run)
    assert [r.step for r in reader.records("w")] == [s for s in range(9) if s not in dropped]
    assert reader.missing() == [("w", step, 0) for step in dropped]
    assert queue.ledger.reasons()["over budget"] == len(dropped)


@pytest.mark.slow
@pytest.mark.fault("disk full")
def test_what_a_full_disk_has_no_room_for_is_counted_and_missing_in_the_run(
    tmp_path, small_disk, caplog, monkeypatch
):
    monkeypatch.setattr("tensortap.runs.sink._RETRY", 0.05)
    queue, pool = open_queue(tmp_path), Pool()
    assert put(queue, large(0, 0.0, pool=pool)).wait(60)
    small_disk(100_000)  # less than a file with one of these values, and more than their rows
    tickets = [put(queue, large(seq, float(seq), pool=pool), 80_000) for seq in range(1, 8)]
    tickets.append(put(queue, record("small", 1.0, step=8)))
    queue.close(10_000)  # does not wait that long for a disk that is full
    reader = RunReader(queue.sink.run)
    assert [r.step for r in reader.records("w")] == [0]
    missing = reader.missing()
    assert missing == [("w", step, 0) for step in range(1, 8)] + [("small", 8, 0)] * (
        len(missing) - 7
    )
    assert queue.ledger.reasons()["error"] == len(missing)
    assert [t.wait(0) for t in tickets[:7]] == [False] * 7
    assert f"{len(missing)} values are missing in" in caplog.text
    assert not list(queue.sink.run.rglob("*.part"))


@pytest.mark.slow
@pytest.mark.fault("disk full")
def test_a_run_without_any_room_is_not_opened_and_training_continues(
    tmp_path, small_disk, caplog, monkeypatch
):
    monkeypatch.setenv("TENSORTAP_SERVER", "127.0.0.1:1")
    monkeypatch.setattr("tensortap.runs.init._END", 10_000.0)
    small_disk(1)
    tap.init(tmp_path / "runs")
    tap.catch(1.0, "x")
    assert tap.dump([1], "y") is None
    tap.finish()
    assert "training continues without" in caplog.text
    small_disk(None)
    path = tap.init(tmp_path / "runs")
    tap.catch(1.0, "x")
    tap.finish()
    assert [r.name for r in everything(path)] == ["x"]
    with pytest.raises(tap.core.errors.NotFound, match=r"call tap\.init"):
        tap.dump([1], "y")


def columns_of(*names: str, step: int = 0) -> RecordColumns:
    arrays = [np.arange(float(n + 1)) for n in range(len(names))]
    memories = [(x.ctypes.data, code_of("float64"), x.shape, None) for x in arrays]
    heads = tuple(
        Record(name, Kind.WEIGHT, 0, 0, 0, 0, 1, 0, "", "float64", x.shape, tags={"n": name})
        for name, x in zip(names, arrays, strict=True)
    )
    seqs = [1_000_000 + 100 * step + n for n in range(len(names))]  # of no other record
    times = [1_000_000] * len(names)
    return RecordColumns(heads, step, seqs, 0, 1, times, summarize_many(memories))


def test_columns_arrive_as_records_among_others(tmp_path):
    queue = open_queue(tmp_path)
    sent = [record("a"), columns_of("x", "y"), record("b"), columns_of("x", "y", step=1), record()]
    for one in sent:
        assert write_to([queue], one, 0)
    assert queue.flush(60)
    queue.close(60)
    expected = [r for one in sent for r in (one.records() if one in sent[1::2] else [one])]
    assert everything(queue.sink.run) == sorted(expected, key=lambda r: (r.step, r.seq))
    assert len(expected) == 7


def test_columns_of_numbers_are_stored_like_single_records(tmp_path):
    numbers = [0.5, -0.0, math.inf, 5e-324, -1e300]
    heads = tuple(
        Record(f"n{i}", Kind.HEALTH, 0, 0, 0, 0, 1, 0, "builtins.float", tags={"i": str(i)})
        for i in range(len(numbers))
    )
    values = np.array(numbers).tobytes()
    columns = RecordColumns(heads, 7, range(1, 6), 0, 1, [1_000_000] * 5, None, values)
    tables = []
    for folder, sent in (("together", [columns]), ("single", columns.records())):
        queue = open_queue(tmp_path / folder)
        for one in sent:
            assert write_to([queue], one, 0)
        queue.close(60)
        assert [r.value for r in everything(queue.sink.run)] == numbers
        (path,) = queue.sink.run.rglob("*.parquet")
        tables.append(pq.read_table(path))
    assert tables[0].equals(tables[1])
    assert tables[0].column("number").to_pylist() == numbers


def test_columns_that_are_dropped_count_as_records(tmp_path, small_disk, caplog):
    queue = open_queue(tmp_path)
    limit = sum(path.stat().st_size for path in queue.sink.run.rglob("tail*"))
    small_disk(limit)
    write_to([queue], columns_of("x", "y", "z"), 0)
    wait_for(lambda: queue.sink.failing)
    queue.drop_all()
    small_disk(None)
    assert queue.ledger.reasons()["disconnected"] == 3
    queue.close(60)
