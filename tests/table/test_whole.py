"""Whole tensors, merged from what ranks recorded."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.core.record import Kind, Record, Shard
from tensortap.rooms.figures.figures.exponents import _without_recomputed
from tensortap.runs import tables
from tensortap.runs.rows import STATISTICS
from tensortap.runs.run_reader import RunReader
from tensortap.stats import summarize_array
from tensortap.stats.merge import merge, merge_column, merged_from
from tensortap.table.columns import exponents
from tensortap.table.numbering import codes
from tensortap.table.shard_keys import places_of
from tensortap.table.sources import RecordSource
from tensortap.table.table import Table, table_of
from tests.figures.conftest import RunWriter

_RANDOM = np.random.default_rng(0)


def record(
    name, kind, step, rank, array, *, offsets=None, whole=None, places=(), tags=None, call=0
):
    shard = None if offsets is None else Shard(whole, offsets, places)
    seq = next(_SEQ)
    return Record(
        name, kind, step, call, seq, rank, 4, 0, "", str(array.dtype), array.shape, shard, None,
        None, summarize_array(array), tags or {},
    )  # fmt: skip


_SEQ = itertools.count()


def checked(table, name, kind, array, step=0):
    """Assert that a table has one row of a tensor, with the statistics of `array`."""
    rows = table.series(kind.value, name)
    rows = rows[table.step[rows] == step]
    assert len(rows) == 1
    expected = summarize_array(array)
    for statistic in STATISTICS:
        found, wanted = table.column(statistic)[rows[0]], getattr(expected, statistic)
        if statistic in ("mean", "std", "mean_abs", "rm2", "rm4", "rm8"):
            np.testing.assert_allclose(found, wanted, rtol=1e-12, err_msg=statistic)
        else:
            np.testing.assert_equal(found, wanted, err_msg=statistic)
    counts = exponents(table, rows)
    bins = {counts.low + i: n for i, n in enumerate(counts.counts[:, 0].tolist()) if n}
    assert bins == expected.exponents


def shards(name, kind, array, offsets, step=0):
    """Return the records of the row shards of `array` that begin at `offsets`, one per rank."""
    ends = [*offsets[1:], len(array)]
    return [
        record(
            name, kind, step, rank, array[a:b], offsets=(a, 0), whole=array.shape, places=("S(0)",)
        )
        for rank, (a, b) in enumerate(zip(offsets, ends, strict=True))
    ]


def test_uneven_shards_are_merged():
    weight = _RANDOM.normal(size=(7, 3)) * 1e-3
    weight[2] = [np.nan, np.inf, 0.0]
    table = table_of(shards("w", Kind.WEIGHT, weight, [0, 2, 4, 7])).whole()
    checked(table, "w", Kind.WEIGHT, weight)
    assert table.ranks() == [0]


def test_replicas_of_shards_count_once():
    state = _RANDOM.normal(size=(6, 4)).astype("float32")
    first = shards("w.exp_avg", Kind.OPTIMISER_STATE, state, [0, 3])
    again = [
        record(r.name, r.kind, 0, r.rank + 2, state[r.shard.offsets[0] :][:3],
               offsets=r.shard.offsets, whole=state.shape, places=("R", "S(0)"))
        for r in first
    ]  # fmt: skip
    checked(table_of(first + again).whole(), "w.exp_avg", Kind.OPTIMISER_STATE, state)


def test_replicated_parameters_count_once_and_stay_apart_if_they_differ():
    weight = _RANDOM.normal(size=(3, 3))
    same = [record("w", Kind.WEIGHT, 0, rank, weight) for rank in range(3)]
    checked(table_of(same).whole(), "w", Kind.WEIGHT, weight)
    other = weight.copy()
    other[1, 1] += 1e-9
    table = table_of([*same, record("w", Kind.WEIGHT, 0, 3, other)]).whole()
    assert sorted(table.rank[table.series("Weight", "w")]) == [0, 1, 2, 3]


def test_activations_merge_over_the_global_batch():
    batch = _RANDOM.normal(size=(8, 5)).astype("float32")
    records = [
        record("fc", kind, 0, rank, batch[2 * rank : 2 * rank + 2])
        for kind in (Kind.ACTIVATION, Kind.GRADIENT)
        for rank in range(4)
    ]
    table = table_of(records).whole()
    checked(table, "fc", Kind.ACTIVATION, batch)
    checked(table, "fc", Kind.GRADIENT, batch)


def test_tensor_parallel_outputs_of_two_batches():
    batch = _RANDOM.normal(size=(4, 6))
    tags = [{"placements": "S(1)", "batch": str(rank // 2 * 2)} for rank in range(4)]
    records = [
        record("up", Kind.ACTIVATION, 0, rank, batch[rank // 2 * 2 :][:2, rank % 2 * 3 :][:, :3],
               offsets=(0, rank % 2 * 3), whole=(2, 6), places=("S(1)",), tags=tags[rank])
        for rank in range(4)
    ]  # fmt: skip
    records += [
        record("norm", Kind.ACTIVATION, 0, rank, batch[rank // 2 * 2 :][:2],
               tags={**tags[rank], "placements": "?"})
        for rank in range(4)
    ]  # fmt: skip
    table = table_of(records).whole()
    checked(table, "up", Kind.ACTIVATION, batch)
    checked(table, "norm", Kind.ACTIVATION, batch)


def test_what_cannot_be_merged_stays_per_rank():
    x = _RANDOM.normal(size=(2, 3, 4))
    partial = {"offsets": (0, 0), "whole": (3, 4), "places": ("P(sum)",)}
    records = [record("down", Kind.ACTIVATION, 0, rank, x[rank], **partial) for rank in (0, 1)]
    unknown = {"tags": {"placements": "?"}}
    records += [record("split", Kind.ACTIVATION, 0, rank, x[rank], **unknown) for rank in (0, 1)]
    records += [record("caught", Kind.VALUE, 0, rank, x[rank]) for rank in (0, 1)]
    table = table_of(records).whole()
    for kind, name in (("Activation", "down"), ("Activation", "split"), ("Value", "caught")):
        assert table.rank[table.series(kind, name)].tolist() == [0, 1]


def test_repeated_calls_do_not_mix():
    x = _RANDOM.normal(size=(2, 2, 3))
    records = [
        record("fc", Kind.ACTIVATION, 0, rank, x[rank], tags={"recompute": "1"} if again else {})
        for again in (False, True)
        for rank in (0, 1)
    ]
    table = table_of(records).whole()
    rows = table.series("Activation", "fc")
    assert table.column("count")[rows].tolist() == [12.0, 12.0]
    assert len(_without_recomputed(table, rows)) == 1


def test_a_growing_table_waits_for_ranks_that_are_behind():
    records = []
    parts = Table(lambda: RecordSource(lambda count: records[count:]))
    add = lambda step, rank: records.append(record("fc", Kind.ACTIVATION, step, rank, np.ones(4)))
    for rank in (0, 1):
        add(0, rank)
    parts.refresh()
    whole = parts.whole()
    assert whole.column("count").tolist() == [8.0]
    add(1, 0)
    whole.refresh()
    assert len(whole) == 1  # rank 1 has not got there
    add(1, 1)
    add(2, 0)
    whole.refresh()
    assert whole.column("count").tolist() == [8.0]
    add(2, 1)
    whole.refresh()
    whole.refresh()  # nothing new has come
    assert whole.column("count").tolist() == [8.0] * 3
    for step in range(3, 9):  # rank 1 has gone silent
        add(step, 0)
    whole.refresh()
    assert whole.step.tolist() == [0, 1, 2, 3, 4, 5]
    add(3, 1)  # and comes back: the table starts over
    before = whole.generation
    whole.refresh()
    assert whole.generation > before
    assert whole.column("count")[whole.step == 3].tolist() == [8.0]


@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e200])
def test_merging_columns_is_merging_summaries(scale):
    arrays = [_RANDOM.normal(size=n) * scale for n in (5, 1, 0, 4, 3)]
    arrays[3][:] = np.nan
    summaries = [summarize_array(array) for array in arrays]
    columns = {name: np.array([getattr(s, name) for s in summaries], float) for name in STATISTICS}
    starts = np.array([0, 2, 3])
    found = {
        name: merge_column(name, {each: columns[each] for each in merged_from(name)}, starts)
        for name in STATISTICS
    }
    for i, group in enumerate((summaries[:2], summaries[2:3], summaries[3:])):
        expected = merge(*group)
        for name in STATISTICS:
            np.testing.assert_allclose(found[name][i], getattr(expected, name), rtol=1e-14)


@given(st.data())
def test_codes_follow_the_order_of_columns(data):
    size, number = data.draw(st.integers(0, 8)), st.integers(-3, 3) | st.sampled_from([1 << 62])
    numbers = st.lists(number, min_size=size, max_size=size)
    columns = [np.array(data.draw(numbers), np.int64) for _ in range(3)]
    rows = list(zip(*columns, strict=True))
    expected = [sorted(set(rows)).index(row) for row in rows]
    assert codes(*columns).tolist() == expected


def bytes_read():
    """Return how many bytes this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_refresh_reads_only_what_was_appended(tmp_path):
    made = RunWriter(tmp_path, 3)
    values = [
        Record(f"x{i}", Kind.VALUE, 0, 0, i, rank, 3, 0, value=1.0)
        for rank in range(3)
        for i in range(2_000)
    ]
    made.write(values)
    table = table_of(made.path)
    tail = made.path / "records" / "00001" / "tail.arrows"
    total = tail.stat().st_size
    made.write([msgspec.structs.replace(values[2_000], step=1, seq=2_000)])
    appended, before = tail.stat().st_size - total, bytes_read()
    assert table.refresh()
    assert appended < bytes_read() - before < appended + 80_000 < total  # headers, buffers
    assert table.step[-2:].tolist() == [0, 1]
    made.close()


@pytest.mark.parametrize("row_group", [tables.ROW_GROUP, 16])
def test_sealed_tables_have_the_columns_of_their_records(row_group, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROW_GROUP", row_group)
    made, count, written = RunWriter(tmp_path, 6), 40, []
    for rank in range(6):  # rank 4 has other names, rank 5 is behind
        written += [
            msgspec.structs.replace(
                record(
                    f"layer{seq % 4 + 4 * (rank == 4)}", Kind.WEIGHT, seq // 4, rank,
                    np.full((1, 3), rank + seq, np.float32), offsets=(rank % 2, 0), whole=(2, 3),
                ),
                seq=seq,
                tags={"mesh": f"dp={rank // 2}/3 tp={rank % 2}/2", "batch": str(seq // 20)},
            )
            for seq in range(count // (1 + (rank == 5)))
        ]  # fmt: skip
    made.write(written)
    made.close()
    stored, in_memory = table_of(made.path), table_of(written)
    part = RunReader(made.path).by_rank[0].parts[0]
    assert len(part.steps) == -(-count // row_group)
    assert stored.names == in_memory.names
    for column in ("name", "kind", "dtype", "step", "rank", "call", "seq"):
        assert getattr(stored, column).tolist() == getattr(in_memory, column).tolist()
    for statistic in ("count", "nans", "rm2", "max_abs"):
        assert stored.column(statistic).tolist() == in_memory.column(statistic).tolist()
    rows = np.arange(len(stored))
    for one, other in zip(places_of(stored, rows), places_of(in_memory, rows), strict=True):
        assert one.tolist() == other.tolist()
    assert stored.whole().column("rm2").tolist() == in_memory.whole().column("rm2").tolist()
