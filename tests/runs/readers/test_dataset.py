"""Runs as Arrow datasets, also if they are larger than the memory."""

from __future__ import annotations

import os
import subprocess
import sys
from textwrap import dedent

import duckdb
import numpy as np
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

import tensortap as tap
from tensortap.core.record import Kind, Record
from tensortap.runs.layout import part_name
from tensortap.stats import summarize_array
from tests.figures.conftest import RunWriter

_COPIES = 300


def tracked(rank, step, seq, name="fc"):
    array = np.arange(1.0, 2.0 + step, dtype=np.float32)
    stats = summarize_array(array)
    return Record(name, Kind.ACTIVATION, step, 0, seq, rank, 2, 0, "", "float32", array.shape,
                  stats=stats)  # fmt: skip


def test_has_the_records_of_all_ranks_and_of_the_tail(tmp_path):
    made = RunWriter(tmp_path, 2)
    made.write(tracked(0, step, step) for step in range(5))
    made.close()  # rank 0 is sealed
    made.write(tracked(1, step, step, "other") for step in range(3))
    dataset = tap.open(made.path).dataset()
    assert isinstance(dataset, ds.Dataset)
    rows = dataset.to_table(["name", "rank", "step", "max"])
    assert rows.num_rows == dataset.count_rows() == 8
    assert rows.column("max").to_pylist() == [1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 2.0, 3.0]
    wanted = (ds.field("step") >= 2) & (ds.field("name") == "other")
    assert dataset.to_table(["rank"], wanted).to_pydict() == {"rank": [1]}
    query = "select name, rank, count(*), max(max) from dataset where step > 0 group by all"
    assert sorted(duckdb.sql(query).fetchall()) == [("fc", 0, 4, 5.0), ("other", 1, 2, 3.0)]
    made.close()


def test_leaves_out_dropped_records_and_may_be_empty(tmp_path):
    made = RunWriter(tmp_path)
    assert tap.open(made.path).dataset().to_table().num_rows == 0
    made.write([tracked(0, 0, 0)])
    made.stores[0].note_dropped("fc", Kind.ACTIVATION, 1, 0)
    made.close()
    run = tap.open(made.path)
    assert len(run.missing()) == 1
    assert run.dataset().count_rows() == 1


@pytest.mark.slow
def test_a_run_larger_than_the_memory(tmp_path):
    made = RunWriter(tmp_path)
    made.write(tracked(0, step % 50, step) for step in range(8_000))
    made.close()
    folder = made.path / "records" / "00000"
    for number in range(1, _COPIES):  # links: as many rows, but no more on the disk
        os.link(folder / part_name(0), folder / part_name(number))
    dataset = tap.open(made.path).dataset()
    limit = 192 << 20
    one = dataset.head(1_000).nbytes / 1_000
    assert one * dataset.count_rows() > 2 * limit
    # a child that may have only this much memory beside its libraries
    program = f"""
        import resource
        import pyarrow as pa, pyarrow.compute as pc, pyarrow.dataset as ds
        import tensortap as tap
        pa.set_cpu_count(2)
        run = tap.open({str(made.path)!r})
        started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        size = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (size + {limit}, size + {limit}))
        dataset = run.dataset()
        total, seen = 0.0, 0
        for batch in dataset.to_batches():
            total += pc.sum(batch.column("rm2")).as_py()
            seen += batch.nbytes
        found = dataset.scanner(["step", "max"], filter=ds.field("step") == 49).to_table()
        assert seen > 2 * {limit}
        assert pc.max(found.column("max")).as_py() == 50.0
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - started
        assert used << 10 < {limit}, used
        print(found.num_rows, total)
        try:
            dataset.to_table()
        except pa.ArrowMemoryError:
            print("does not fit")
        """
    # the allocator of the system reserves no memory in advance
    env = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}
    printed = subprocess.check_output([sys.executable, "-c", dedent(program)], env=env, text=True)
    rows, total, refused = printed.split(None, 2)
    assert int(rows) == _COPIES * 160
    expected = pc.sum(tap.open(made.path).dataset().head(8_000, columns=["rm2"]).column("rm2"))
    assert float(total) == pytest.approx(_COPIES * expected.as_py())
    assert refused.strip() == "does not fit"
