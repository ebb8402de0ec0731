"""Alerts about ranks that are far from the others, behind or silent: of runs, and live."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest

import tensortap as tap
from tensortap import alerts
from tensortap.alerts import Alert, record_of
from tensortap.alerts.rank_rules import RankLimits
from tensortap.history import History
from tensortap.record import Kind, Record, Shard
from tensortap.stats import summarize_array
from tensortap.table.rank_alerts import LiveRanks, RunRanks, rank_alerts
from tensortap.table.rank_monitor import RankMonitor
from tensortap.table.table import table_of
from tests.viz.conftest import RunWriter

SECOND = 10**9


def job(steps=12, size=lambda rank, step, name: 1.0, ends=None, kind=Kind.ACTIVATION, tags=None):
    """Yield the records of eight ranks in the order in which a server gets them."""
    noise = np.random.default_rng(0)
    for step in range(steps):
        for rank in range(8):
            if step >= (ends or {}).get(rank, steps):
                continue
            for seq, name in enumerate(("first", "second")):
                level = size(rank, step, name) * (1 + 0.05 * noise.standard_normal())
                yield Record(
                    name, kind, step, 0, 10 * step + seq, rank, 8, step * SECOND,
                    dtype="float32", shape=(4,), stats=summarize_array(np.full(4, level, "f4")),
                    tags={} if tags is None else tags(rank),
                )  # fmt: skip


def found(records, limits=None):
    """Return the alerts of a run, after checking that a live session raises the same."""
    records = list(records)
    live = LiveRanks(limits)
    parts = [records[n : n + 5] for n in range(0, len(records), 5)]
    seen = [alert for part in parts for alert in live.see(part, part[-1].time_ns)]
    stored = rank_alerts(table_of(records), limits)
    assert [str(a) for a in seen if a.rule == "outlier"] == [
        str(a) for a in stored if a.rule == "outlier"
    ]
    return stored, seen


def test_a_rank_that_is_far_is_named_once_with_its_first_tensor():
    stored, _ = found(job(size=lambda rank, step, _: 5.0 if rank == 6 and step >= 4 else 1.0))
    (alert,) = stored
    assert (alert.rule, alert.rank, alert.name, alert.step) == ("outlier", 6, "first", 8)
    assert "rank 6 is far from the other ranks since step 4: its RMS is " in alert.message
    assert alert.message.endswith("; so are 1 more of its tensors")
    assert alert.facts["tensors"] == 2


def test_a_few_steps_or_a_small_distance_are_no_alarm():
    assert (
        found(job(size=lambda rank, step, _: 5.0 if rank == 6 and 4 <= step < 8 else 1.0))[0] == []
    )
    assert found(job(size=lambda rank, _, __: 1.8 if rank == 6 else 1.0))[0] == []


def test_a_problem_that_returns_is_reported_again():
    bad = {*range(3, 8), *range(9, 14)}
    size = lambda rank, step, _: 0.01 if rank == 2 and step in bad else 1.0
    assert [alert.step for alert in found(job(16, size))[0]] == [7, 13]


def test_only_ranks_that_should_be_alike_are_compared():
    """Ranks along tp hold other columns; along dp they are alike."""
    mesh = lambda rank: {"mesh": f"dp={rank // 2}/4 tp={rank % 2}/2", "placements": "S(1)"}
    columns = lambda rank, step, name: 100.0 if rank % 2 else 1.0
    weights = lambda records: (
        [Record("w", Kind.WEIGHT, 0, 0, 99, rank, 8, 0, tags=mesh(rank)) for rank in range(8)]
        + list(records)
    )
    assert found(weights(job(size=columns, tags=mesh)))[0] == []
    odd = lambda rank, step, name: columns(rank, step, name) * (9 if rank == 3 else 1)
    (alert,) = found(weights(job(size=odd, tags=mesh)))[0]
    assert (alert.rank, alert.name, alert.facts["median"] > 50) == (3, "first", True)


def test_shards_of_a_parameter_are_not_compared():
    shard = Shard((8, 4), (0, 0), ("S(0)",))
    size = lambda rank, step, name: 9.0 if rank == 1 else 1.0
    records = list(job(size=size, kind=Kind.WEIGHT))
    assert len(found(records)[0]) == 1
    assert found([msgspec.structs.replace(r, shard=shard) for r in records])[0] == []


def test_a_rank_that_went_silent():
    limits = RankLimits(seconds=5)
    (alert,), live = found(job(12, ends={3: 5}), limits)
    assert (alert.rule, alert.rank, alert.step) == ("silent", 3, 11)
    assert "its last record is of step 4, most ranks are at step 11, 7 s later" in alert.message
    assert [(a.rule, a.rank) for a in live] == [("silent", 3)]
    # in a job that waits for it nobody comes further, but time passes
    records = list(job(12, ends={3: 11}))
    assert rank_alerts(table_of(records), limits) == []
    session = LiveRanks(limits)
    assert session.see(records, 12 * SECOND) == []
    (alert,) = session.see([], 30 * SECOND)
    assert alert.rule == "silent"
    assert session.see([], 40 * SECOND) == []  # reported once


def test_a_straggler_is_behind_by_the_time_of_its_records():
    """Records that only arrive late are no reason."""
    slow = [
        Record("x", Kind.METRIC, step, 0, step, rank, 8, (step * (3 if rank == 1 else 1)) * SECOND,
               value=0.5)
        for step in range(40) for rank in range(8) if rank != 1 or step <= 13
    ]  # fmt: skip
    (alert,) = rank_alerts(table_of(slow))
    assert (alert.rule, alert.rank, alert.facts["behind"]) == ("straggler", 1, 26)
    assert "rank 1 is 26 recorded steps behind: it is at step 13" in alert.message
    live = LiveRanks()
    on_time = [r for r in job(40) if r.rank != 1]
    late = [r for r in job(40) if r.rank == 1]
    assert live.see(late[:10], 5 * SECOND) == []
    assert live.see(on_time, 40 * SECOND) == []
    assert live.see(late[10:], 41 * SECOND) == []


def test_no_false_alarm_in_clean_steps_of_eight_ranks():
    """Sizes of gradients of small batches have long tails, and every tensor has its own."""
    draw = np.random.default_rng(1)
    level = 10 ** draw.uniform(-4, 2, 20)
    values = level * np.exp(0.3 * draw.standard_t(3, (1000, 8, 20)))
    assert rank_alerts(table_of(metrics(values))) == []
    values[500:505, 5, 7] *= 1000
    assert [alert.rank for alert in rank_alerts(table_of(metrics(values)))] == [5]


def metrics(values):
    """Return one record per step, rank and name."""
    return [
        Record(
            f"layer{i}", Kind.METRIC, step, 0, i, rank, 8, step, value=float(values[step, rank, i])
        )
        for step, rank, i in np.ndindex(values.shape)
    ]


def test_of_a_large_run_the_newest_steps_are_examined(monkeypatch):
    size = lambda rank, step, _: 5.0 if rank == 6 and (step < 6 or step >= 20) else 1.0
    by_rank = sorted(job(30, size), key=lambda record: record.rank)  # as in a run
    assert [alert.step for alert in rank_alerts(table_of(by_rank))] == [4, 24]
    monkeypatch.setattr("tensortap.table.rank_alerts._MOST_ROWS", 20 * 16)
    assert [alert.step for alert in rank_alerts(table_of(by_rank))] == [24]


def test_a_run_that_grows_is_compared_piece_by_piece():
    """Ranks write many steps at a time: what is read early must not look like a difference."""
    size = lambda rank, step, name: 5.0 if rank == 6 and 4 <= step < 15 else 1.0
    records, limits = list(job(40, size, ends={3: 20})), RankLimits(seconds=12)
    whole = rank_alerts(table_of(records), limits)
    assert [(alert.rule, alert.rank) for alert in whole] == [("outlier", 6), ("silent", 3)]
    table = table_of([])
    ranks = RunRanks(table, limits, world_size=8)
    for first in range(0, 40, 8):
        for rank in range(8):
            table.append([r for r in records if r.rank == rank and first <= r.step < first + 8])
            found = ranks.alerts()
            assert len(found) <= 2
    assert found == whole


def far_job():
    """Return the records of a job with a metric, in which a rank is far from the others."""
    loss = Record("loss", Kind.METRIC, 0, 0, 0, 0, 8, 0, value=1.0)
    return [loss, *job(size=lambda rank, *_: 5.0 if rank == 6 else 1.0)]


def test_a_run_may_grow_while_its_ranks_are_compared(monkeypatch):
    """Its records get new names meanwhile, which must not change those of the others."""
    wanted = rank_alerts(table_of(far_job()))
    table, compare = table_of([]), RankMonitor.compare
    table.append(far_job())

    def growing(self, found):
        table.append([Record(f"new {found.step}", Kind.METRIC, 12, 0, 500, 0, 8, 0, value=1.0)])
        return compare(self, found)

    monkeypatch.setattr(RankMonitor, "compare", growing)
    assert RunRanks(table).alerts() == wanted
    assert [(alert.rule, alert.name) for alert in wanted] == [("outlier", "first")]


def test_a_session_does_not_start_over_while_its_ranks_are_compared(monkeypatch):
    wanted = rank_alerts(table_of(far_job()))
    history = History(1 << 20)
    history.write(far_job())
    table, compare, refreshing = table_of(history), RankMonitor.compare, []

    def evicting(self, found):
        if not refreshing:
            history.bound = 10_000
            history.write(list(job(1)))
            table._limit = 0
            refreshing.append(threading.Thread(target=table.refresh))
            refreshing[0].start()
            refreshing[0].join(0.2)  # it waits for the lock
        return compare(self, found)

    monkeypatch.setattr(RankMonitor, "compare", evicting)
    assert rank_alerts(table) == wanted
    refreshing[0].join()
    assert len(table) < len(far_job())


def test_limits_of_rules_about_ranks(tmp_path):
    run = RunWriter(tmp_path, 8)
    run.write(job(12, lambda rank, *_: 1.5 if rank == 6 else 1.0, ends={3: 5}))
    run.close()
    run = tap.open(run.path)
    assert run.alerts() == []
    outlier = alerts.outlier(deviations=4, factor=1.2, patience=3)
    (far,) = run.alerts(rules=[outlier])
    assert (far.rule, far.rank, far.step) == ("outlier", 6, 2)
    (late,) = run.alerts(rules=[alerts.silent(seconds=5)])
    assert (late.rule, late.rank) == ("silent", 3)
    assert run.alerts(rules=[alerts.straggler(behind=8), alerts.dead()]) == []
    assert run.alerts(rules=True) == []  # with the limits of `run.alerts()`
    with pytest.raises(ValueError, match=r"alerts: outlier compares ranks, .* tap\.serve\(rules="):
        tap.alerts.AlertMonitor([outlier])
    with pytest.raises(ValueError, match=r"rules must compare ranks: .* got 'dead'"):
        tap.serve(port=0, rules=[alerts.dead()])


def test_alerts_of_a_run(tmp_path):
    """Recorded ones and those about ranks; rules see whole tensors, not the parts of ranks."""
    nan = Alert("nan", "first", Kind.ACTIVATION, 2, 0, "first", "holds NaN")
    run = RunWriter(tmp_path, 8)
    run.write(job(size=lambda rank, step, _: 5.0 if rank == 6 else 1.0))
    run.write([record_of(nan, seq=500, time_ns=0, world_size=8)])
    # on each rank, one of eight values is not zero; half of the ranks have only zeros
    for step in range(4):
        for rank in range(8):
            values = np.zeros(8, "f4")
            values[0] = rank % 2
            run.write([
                Record("dying", Kind.ACTIVATION, step, 0, 600 + step, rank, 8, 0, dtype="float32",
                       shape=(8,), stats=summarize_array(values))
            ])  # fmt: skip
    run.close()
    opened = tap.open(run.path)
    assert [(a.rule, a.name, a.step) for a in opened.alerts()] == [
        ("nan", "first", 2), ("outlier", "first", 4)
    ]  # fmt: skip
    assert opened.alerts(rules=[alerts.dead(share=0.95)]) == []
    (found,) = opened.alerts(rules=[alerts.dead(share=0.9)])
    assert (found.name, found.step, found.facts["zeros"]) == ("dying", 2, 60 / 64)
