"""The query that compares ranks: replicas that differ, ranks that are far from others or behind."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import tensortap as tap
from tensortap import alerts
from tensortap.alerts import Alert, record_of
from tensortap.core.record import Kind, Record, Shard
from tensortap.rooms.ranks import findings as ranks
from tensortap.rooms.ranks import suspects
from tensortap.rooms.ranks.findings import GrowingFindings, rank_findings
from tensortap.rooms.track.shard_digest import shard_digest
from tensortap.stats import summarize_array
from tensortap.table.table import table_of
from tests.figures.conftest import RunWriter

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


def weights(change=None, world=8, steps=6, names=("fc.weight", "fc.bias"), digests=False, **more):
    """Yield the weights of a job in which all ranks have the same ones, rank by rank.

    `change` gets rank, step, name and array, and may change the array.
    """
    for rank in range(world):
        for step in range(steps):
            for seq, name in enumerate(names):
                values = np.random.default_rng([step, seq]).standard_normal(64, np.float32)
                if change is not None:
                    change(rank, step, name, values)
                yield Record(
                    name, Kind.WEIGHT, step, 0, 10 * step + seq, rank, world, step * SECOND,
                    dtype="float32", shape=(64,), stats=summarize_array(values),
                    digest=shard_digest(values) if digests else None, **more,
                )  # fmt: skip


def found(records, **options):
    return rank_findings(table_of(list(records)), **options)


# -- replicas ------------------------------------------------------------------------------------


def add_one(ranks_, first_step, names=("fc.weight",)):
    def change(rank, step, name, values):
        if rank in ranks_ and step >= first_step and name in names:
            values[3] += 1

    return change


def test_a_wrong_weight_is_named_with_rank_tensor_module_and_step():
    (finding,) = found(weights(add_one([2], 3)))
    assert (finding.rule, finding.ranks, finding.name, finding.kind) == (
        "replicas", (2,), "fc.weight", Kind.WEIGHT
    )  # fmt: skip
    assert (finding.module, finding.step, finding.last_step, finding.tensors) == ("fc", 3, 5, 1)
    assert str(finding) == "rank 2 has another fc.weight (Weight) than the other 7 since step 3"
    alert = finding.alert
    assert (alert.rule, alert.rank, alert.step, alert.module) == ("replicas", 2, 3, "fc")


def test_digests_tell_what_statistics_do_not():
    def swapped(rank, step, name, values):
        if rank == 1 and step == 4 and name == "fc.bias":
            values[:] = values[::-1].copy()

    assert found(weights(swapped, world=3)) == []
    (finding,) = found(weights(swapped, world=3, digests=True))
    assert (finding.ranks, finding.name, finding.step, finding.last_step) == ((1,), "fc.bias", 4, 4)
    # a rank that kept a whole tensor has a digest of another kind
    records = [
        msgspec.structs.replace(r, digest=bytes([r.rank] * 16)) if r.step == 2 else r
        for r in weights(world=3, digests=True)
    ]
    assert found(records) == []


@pytest.mark.parametrize("case", ["same", "split", "parts", "constant"])
def test_ranks_that_get_the_same_data(case):
    def change(rank, step, name, values):
        values += rank * (case == "parts" and name == "fc.bias")

    def loss(rank, step):
        value = 1.0 if case == "constant" else 1.0 / (1 + step) + rank * (case == "split") * 1e-9
        return Record("loss", Kind.METRIC, step, 0, 0, rank, 4, 0, value=value)

    losses = [loss(rank, step) for rank in range(4) for step in range(12)]
    growing = GrowingFindings(table_of([*weights(change, world=4), *losses]))
    assert "same_data" in growing.rules
    says = [alert.message for alert in growing.get() if alert.rule == "same_data"]
    assert [each.partition(",")[0] for each in says] == (
        ["all 4 ranks compute the same loss in each step"] if case == "same" else []
    )


def test_without_a_majority_all_are_named():
    (finding,) = found(weights(add_one([1], 2), world=2))
    assert finding.ranks == (0, 1)
    assert finding.message == (
        "fc.weight (Weight) differs between ranks 0, 1 since step 2, without a majority"
    )


def test_tensors_that_begin_to_differ_together_are_one_finding():
    both = add_one([5, 6], 1, ("fc.weight", "fc.bias"))
    later = add_one([2], 4)
    first, second = found(weights(lambda *each: (both(*each), later(*each))))
    assert (first.ranks, first.name, first.tensors, first.step) == ((5, 6), "fc.weight", 2, 1)
    assert first.message.endswith("than the other 6 since step 1; 2 tensors differ")
    # from step 4 on, other ranks differ in the weight
    assert (second.ranks, second.name, second.step) == ((2, 5, 6), "fc.weight", 4)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_models_of_their_own_do_not_disagree(world):
    """Their norms and biases begin alike, but only because all elements are equal."""

    def own(rank, step, name, values):
        values += rank
        if step == 0 and name == "fc.bias":
            values[:] = 0

    assert found(weights(own, world=world)) == []


def test_initial_weights_that_differ_are_found_where_gradients_tell_that_they_are_replicas():
    gradients = (
        msgspec.structs.replace(r, kind=Kind.WEIGHT_GRADIENT, seq=r.seq + 2)
        for r in weights(world=2)
    )
    (finding,) = found([*weights(add_one([1], 0), world=2), *gradients])
    assert (finding.ranks, finding.name, finding.step) == ((0, 1), "fc.weight", 0)


def test_gradients_of_weights_may_differ_until_the_program_averages_them():
    gradients = weights(lambda rank, step, name, values: values.__iadd__(rank))
    as_gradients = (msgspec.structs.replace(r, kind=Kind.WEIGHT_GRADIENT) for r in gradients)
    assert found([*weights(), *as_gradients]) == []


def test_only_the_same_shards_are_replicas():
    """Two shards with two replicas each."""
    place = lambda rank: Shard((128,), (64 * (rank % 2),), ("R", "S(0)"))
    half = lambda rank, step, name, values: values.__iadd__(rank % 2)
    records = [msgspec.structs.replace(r, shard=place(r.rank)) for r in weights(half, world=4)]
    assert found(records) == []
    odd = lambda *each: (half(*each), add_one([3], 2)(*each))
    records = [msgspec.structs.replace(r, shard=place(r.rank)) for r in weights(odd, world=4)]
    (finding,) = found(records)
    assert (finding.ranks, finding.name, finding.step) == ((1, 3), "fc.weight", 2)


def test_chunks_of_a_large_run_are_compared_one_by_one(monkeypatch):
    records = [*weights(add_one([2], 3)), *job(size=lambda rank, *_: 5.0 if rank == 6 else 1.0)]
    expected = found(records)
    assert [each.rule for each in expected] == ["outlier", "replicas"]
    monkeypatch.setattr(suspects, "_CHUNK", 20)
    monkeypatch.setattr(ranks, "_TOGETHER", 20)
    assert found(records) == expected


def test_hostile_ranks_and_steps_take_no_memory():
    far = {2: (1 << 31) - 1, 3: (1 << 62)}
    records = [
        msgspec.structs.replace(r, rank=far[2] if r.rank == 2 else r.rank,
                                step=far[3] if r.step == 5 else -far[3] if r.step == 0 else r.step)
        for r in weights(add_one([2], 3))
    ]  # fmt: skip
    (finding,) = found(records)
    assert (finding.rule, finding.ranks, finding.step) == ("replicas", (far[2],), 3)


# -- statistics ----------------------------------------------------------------------------------


def test_a_rank_that_is_far_is_named_once_with_its_first_tensor():
    (finding,) = found(job(size=lambda rank, step, _: 5.0 if rank == 6 and step >= 4 else 1.0))
    assert (finding.rule, finding.ranks, finding.name) == ("outlier", (6,), "first")
    assert (finding.step, finding.last_step, finding.tensors) == (4, 11, 2)
    assert finding.message.startswith("rank 6 is far from the other ranks since step 4: its RMS is")
    assert finding.message.endswith("; 2 of its tensors are far")


def test_a_few_steps_or_a_small_distance_are_no_finding():
    assert found(job(size=lambda rank, step, _: 5.0 if rank == 6 and 4 <= step < 8 else 1.0)) == []
    assert found(job(size=lambda rank, _, __: 1.8 if rank == 6 else 1.0)) == []


def test_a_rank_with_nan_while_most_are_finite():
    (finding,) = found(job(size=lambda rank, *_: np.nan if rank == 3 else 1.0))
    assert (finding.ranks, finding.step) == ((3,), 0)
    assert "it holds NaN or Inf, their median is " in finding.message
    assert found(job(size=lambda rank, *_: np.nan)) == []


def test_shards_of_a_parameter_are_not_compared():
    shard = Shard((8, 4), (0, 0), ("S(0)",))
    size = lambda rank, step, name: 9.0 if rank == 1 else 1.0
    records = list(job(size=size, kind=Kind.WEIGHT))
    far = lambda records: [each for each in found(records) if each.rule == "outlier"]
    assert len(far(records)) == 1
    assert far(msgspec.structs.replace(r, shard=shard) for r in records) == []


def metrics(values):
    """Return one record per step, rank and name."""
    return [
        Record(
            f"layer{i}", Kind.METRIC, step, 0, i, rank, 8, step, value=float(values[step, rank, i])
        )
        for step, rank, i in np.ndindex(values.shape)
    ]


def test_no_false_alarm_in_clean_steps_of_eight_ranks():
    """Sizes of gradients of small batches have long tails, and every tensor has its own."""
    draw = np.random.default_rng(1)
    level = 10 ** draw.uniform(-4, 2, 20)
    values = level * np.exp(0.3 * draw.standard_t(3, (300, 8, 20)))
    assert found(metrics(values)) == []
    values[150:155, 5, 7] *= 1000
    (finding,) = found(metrics(values))
    assert (finding.ranks, finding.name, finding.step) == ((5,), "layer7", 150)


# -- progress ------------------------------------------------------------------------------------


def test_a_rank_that_stopped(monkeypatch):
    monkeypatch.setattr(ranks, "_LATE_SECONDS", 5)
    (finding,) = found(job(12, ends={3: 5}))
    assert (finding.rule, finding.ranks, finding.step, finding.last_step) == ("behind", (3,), 4, 11)
    assert finding.message == (
        "rank 3 is 7 recorded steps behind: its last record is of step 4, most ranks are at step "
        "11, 7 s later"
    )
    # in a job that waits for it nobody comes further, but time passes
    records = list(job(12, ends={3: 11}))
    assert found(records) == []
    (finding,) = found(records, now_ns=30 * SECOND)
    assert (finding.rule, finding.step) == ("behind", 10)


def test_a_slow_rank_is_behind_by_the_time_of_its_records():
    """Records that only arrive late are no reason."""
    slow = [
        Record("x", Kind.METRIC, step, 0, step, rank, 8, (step * (3 if rank == 1 else 1)) * SECOND,
               value=0.5)
        for step in range(40) for rank in range(8) if rank != 1 or step <= 13
    ]  # fmt: skip
    (finding,) = found(slow)
    assert (finding.rule, finding.ranks) == ("behind", (1,))
    assert "rank 1 is 26 recorded steps behind: its last record is of step 13" in finding.message
    late = [r for r in job(40) if r.rank != 1 or r.step < 13]
    assert found(late) == []


# -- growing tables, runs ------------------------------------------------------------------------


def test_settled_steps_are_those_that_all_ranks_have_passed():
    """Of later ones, records may be on their way: here those of ranks with the right weight."""
    records = [r for r in weights(add_one([0], 2)) if r.step < 5 or r.rank < 2]
    assert [each.step for each in found(records, settled=True)] == [2]
    only_two = [r for r in weights(add_one([0], 2)) if r.step < 2 or r.rank < 2]
    assert found(only_two, settled=True) == []
    assert [each.ranks for each in found(only_two)] == [(0, 1)]


def test_a_run_that_grows_is_compared_again():
    size = lambda rank, step, name: 5.0 if rank == 6 and 4 <= step < 15 else 1.0
    records = list(job(40, size))
    table = table_of([])
    growing = GrowingFindings(table)
    for first in range(0, 40, 8):
        for rank in range(8):
            table.append([r for r in records if r.rank == rank and first <= r.step < first + 8])
            table.version += 1
            growing._next = 0.0
            assert {each.rank for each in growing.get()} <= {6}
    assert growing.get() == [each.alert for each in rank_findings(table)]
    assert [(each.step, each.facts["last_step"]) for each in growing.get()] == [(4, 14)]


def test_alerts_of_a_run(tmp_path):
    """Recorded ones and those about ranks; rules see whole tensors, not the parts of ranks."""
    nan = Alert("nan", "first", Kind.ACTIVATION, 2, 0, "first", "holds NaN")
    run = RunWriter(tmp_path, 8)
    run.write(job(size=lambda rank, step, _: 5.0 if rank == 6 and step >= 3 else 1.0))
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
        ("nan", "first", 2), ("outlier", "first", 3)
    ]  # fmt: skip
    (finding,) = opened.ranks()
    assert (finding.rule, finding.ranks, finding.module) == ("outlier", (6,), "first")
    assert opened.alerts(rules=[alerts.dead(share=0.95)]) == []
    (dead,) = opened.alerts(rules=[alerts.dead(share=0.9)])
    assert (dead.name, dead.step, dead.facts["zeros"]) == ("dying", 2, 60 / 64)
    assert "outlier" in [each.rule for each in opened.alerts(rules=True)]
