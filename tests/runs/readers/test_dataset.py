"""Runs as Arrow datasets."""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow.dataset as ds

import tensortap as tap
from tensortap.core.record import Kind, Record
from tensortap.stats import summarize_array
from tests.figures.conftest import RunWriter


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
