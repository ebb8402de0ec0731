"""The reader of a run on disk."""

from __future__ import annotations

import fsspec
import msgspec
import numpy as np
import pytest

import tensortap as tap
from tensortap.capture.queue import Queue
from tensortap.capture.ticket import Ticket
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.record import Kind
from tensortap.runs import tables
from tensortap.runs.folders import make_run
from tensortap.runs.run_reader import RunReader
from tensortap.runs.sink import StoreSink
from tensortap.runs.tables import RankTables
from tests.runs.readers.contract import RECORDS, ReaderContract, record


def write(path, records, **options):
    """Write records into a run, each into the tables of its rank."""
    sinks = {}
    for one in records:
        if one.rank not in sinks:
            store = StoreSink(path, one.rank, **options)
            sinks[one.rank] = Queue(store, budget=1 << 30, overflow="newest", name="test")
        sinks[one.rank].write(one, Ticket(1), 8)
    return sinks


class TestOpenRun(ReaderContract):
    """A run that is being written: everything is in the tail."""

    @pytest.fixture
    def reader(self, tmp_path):
        run = make_run(tmp_path, 2)
        sinks = write(run, RECORDS)
        assert all(sink.flush(60) for sink in sinks.values())
        yield RunReader(run)
        for sink in sinks.values():
            sink.close()


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("sealed"), 2)
    for sink in write(run, RECORDS).values():
        sink.close(60)
    return run


class TestSealedRun(ReaderContract):
    """A finished run: everything is in Parquet."""

    @pytest.fixture
    def reader(self, sealed):
        found = RunReader(sealed)
        assert all(reader.parts and not reader.tail for reader in found.by_rank.values())
        return found


def test_crash_between_sealing_and_new_tail_shows_nothing_twice(tmp_path):
    run = make_run(tmp_path, 1)
    sinks = write(run, [record(seq, "x", float(seq)) for seq in range(5)])
    assert sinks[0].flush(60)
    tail = run / "records" / "00000" / "tail.arrows"
    old = tail.read_bytes()
    sinks[0].close(60)
    tail.write_bytes(old)  # as if the new tail had never been written
    assert [r.seq for r in RunReader(run).new_records()] == list(range(5))


@pytest.mark.slow
def test_many_row_groups_and_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROW_GROUP", 7)
    monkeypatch.setattr("tensortap.runs.sink._TAIL_ROWS", 40)
    monkeypatch.setattr("tensortap.runs.sink._ROWS", 10)
    run = make_run(tmp_path, 1)
    records = [
        msgspec.structs.replace(RECORDS[0], name="ab"[i % 2], step=i // 2, seq=i, value=float(i))
        for i in range(333)
    ]
    (sink,) = write(run, records).values()
    assert sink.flush(60)
    reader = RunReader(run)
    assert len(reader.by_rank[0].parts) >= 5
    assert reader.counts() == {"a": 167, "b": 166}
    for name, first in (("a", 0), ("b", 1)):
        assert [r.seq for r in reader.records(name)] == list(range(first, 333, 2))
        (found,) = reader.records(name, step=77)
        assert reader.load(found).value == 2.0 * 77 + first
        assert [r.seq for r in reader.records(name, last=1)][-1] == [332, 331][first]
    assert [r.seq for r in reader.new_records()] == list(range(333))
    assert reader.new_records() == []
    sink.write(msgspec.structs.replace(records[0], seq=333), Ticket(1), 8)
    sink.close(60)
    reader.refresh()
    assert [r.seq for r in reader.new_records()] == [333]


@pytest.mark.slow
def test_reads_tables_once_for_many_names(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROW_GROUP", 50)
    monkeypatch.setattr("tensortap.runs.sink._TAIL_ROWS", 200)
    monkeypatch.setattr("tensortap.runs.run_reader._BATCH", 150)
    run = make_run(tmp_path, 2)
    kinds = (Kind.VALUE, Kind.WEIGHT)
    records = [
        msgspec.structs.replace(
            RECORDS[0], name=f"n{i % 100}", kind=kinds[i % 3 == 0], step=i // 100, seq=i,
            rank=i % 2, time_ns=i, value=float(i),
        )
        for i in range(500)
    ]  # fmt: skip
    for sink in write(run, records).values():
        sink.close(60)
    reader = RunReader(run)
    want = {name: reader.records(name) for name in reader.names()}
    newest = {(r.name, r.kind, r.rank): r for held in want.values() for r in held}
    looks = []
    read = RankTables.read
    monkeypatch.setattr(RankTables, "read", lambda *a, **k: looks.append(1) or read(*a, **k))
    assert dict(reader.by_name(want)) == want
    assert list(reader.by_name([])) == []
    assert len(looks) < 100
    latest = tap.open(run).rows()
    assert {(row.head.name, row.head.kind, row.head.rank): row.head for row in latest} == newest
    assert list(dict.fromkeys(row.head.name for row in latest)) == list(want)
    for row in latest:
        same = [
            r for r in want[row.head.name] if (r.kind, r.rank) == (row.head.kind, row.head.rank)
        ]
        assert row.records == len(same)
        assert reader.load(row.head).value == float(row.head.seq)


def test_run_on_object_storage(tmp_path):
    path, storage = tap.init(tmp_path), fsspec.filesystem("memory")
    tap.catch(np.arange(5.0), "x")
    tap.dump(np.ones(3), "dumped")
    tap.flush(60)
    storage.put(str(path), "/bucket/run", recursive=True)
    run = tap.open("memory://bucket/run")
    assert run.get("x").tolist() == [0, 1, 2, 3, 4]
    assert run.get("dumped").tolist() == [1, 1, 1]
    tap.catch(np.arange(2.0), "x")
    tap.finish()
    storage.put(f"{path}/", "/bucket/run/", recursive=True)
    run.reader.refresh()
    assert [value.tolist() for value in run.get_all("x")] == [[0, 1, 2, 3, 4], [0, 1]]
    with pytest.raises(NotFound, match="no such run: memory://bucket/other"):
        tap.open("memory://bucket/other")
    with pytest.raises(TensortapError, match="cannot be opened"):
        tap.open("nowhere://bucket/run")
