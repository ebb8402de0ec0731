"""Ranks side by side: outliers, the tree of a mesh, and what the command prints of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tensortap.core.record import Kind, Record
from tensortap.rooms.figures.figures.theme import untyped
from tensortap.rooms.ranks.figure import ranks_figure
from tensortap.rooms.ranks.mesh import MeshLayout, group_keys, mesh_layout, rank_tree
from tensortap.rooms.ranks.ranks import alike_groups, over_names, over_steps, uncompared
from tensortap.stats import summarize_array
from tensortap.table.table import table_of
from tests.commands import type_in
from tests.page.conftest import Writer


def records(ranks=8, steps=10, odd=None, late=None):
    for rank in range(ranks):
        for step in range(steps - (3 if rank == late else 0)):
            size = 5 if rank == odd and step >= 6 else 1
            stats = summarize_array(np.full(4, size, "f4"))
            tags = {"mesh": f"dp={rank // 2}/{ranks // 2} tp={rank % 2}/2"}
            yield Record("w", Kind.WEIGHT, step, 0, step, rank, ranks, 0, dtype="float32",
                         shape=(4,), stats=stats, tags=tags)  # fmt: skip


def test_marks_only_the_rank_that_is_far():
    table = table_of(list(records(odd=5)))
    far = over_steps(table, "Weight", "w", "rm2").far
    assert np.argwhere(far).tolist() == [[5, step] for step in range(6, 10)]
    assert over_names(table, "Weight", 7, "rm2").far.ravel().tolist() == [False] * 5 + [
        True, False, False
    ]  # fmt: skip
    assert not over_steps(table_of(list(records())), "Weight", "w", "rm2").far.any()


def test_a_mesh_is_a_tree_of_at_most_32_siblings():
    mesh = MeshLayout(("dp", "tp"), {rank: divmod(rank, 8) for rank in range(1024)})
    top = rank_tree(mesh, (), 512)
    assert len(top) == 32
    assert (top[1].key, top[1].label, len(top[1].ranks)) == ("4-7", "dp 4 – 7", 32)
    opened = rank_tree(mesh, {"4-7", "5"}, 512)
    assert [row.label for row in opened[1:6]] == [
        "dp 4 – 7", "dp 4", "dp 5", "tp 0 · rank 40", "tp 1 · rank 41",
    ]  # fmt: skip
    leaves = [row.ranks for row in rank_tree(mesh, group_keys(mesh), 1 << 20) if row.is_leaf]
    assert leaves == [(rank,) for rank in range(1024)]
    assert len(rank_tree(mesh, group_keys(mesh), 100)) < 200
    assert mesh.place(41) == "dp 5, tp 1"


def test_without_a_mesh_ranks_are_numbered():
    plain = [Record("x", Kind.VALUE, 0, 0, 0, rank, 2, 0, value=1.0) for rank in range(2)]
    assert mesh_layout(table_of(plain)) == MeshLayout(("rank",), {0: (0,), 1: (1,)})


def test_columns_keep_the_step_of_an_outlier():
    one = [r for r in records(steps=2000, odd=5) if (r.rank, r.step) == (5, 1234)]
    table = table_of([*(r for r in records(steps=2000) if (r.rank, r.step) != (5, 1234)), *one])
    figure = ranks_figure(table, mesh_layout(table), kind="Weight", metric="rm2", name="w")
    custom = untyped(figure["data"][0]["customdata"])
    assert custom.shape[1] <= 500
    far = custom[custom[:, :, 4] > 8]
    assert set(map(tuple, far[:, :2].tolist())) == {(5.0, 1234.0)}
    assert [each["rank"] for each in figure["outliers"]] == [5]


@pytest.mark.slow
def test_command(tmp_path):
    for rank in range(40):
        run = Writer(tmp_path, "r", rank=rank, world_size=40)
        for record in records(40, odd=5, late=7):
            if record.rank == rank:
                run.put("w", "Weight", record.step, None, record.stats, "float32", (4,),
                        record.tags)  # fmt: skip
        run.close(end=rank == 39)
    code, printed, _ = type_in("ranks", tmp_path / "r", COLUMNS="80")
    assert code == 1
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "40 ranks, mesh dp × tp, 397 records, newest step 9"
    assert lines[2].split() == ["7", "dp", "3,", "tp", "1", "7", "0", "to", "6", "3", "steps"]
    assert lines[3] == "39 ranks are at step 9"
    assert lines[4] == "rank 5 has another w (Weight) than the other 39 since step 6"
    found = json.loads(type_in("ranks", tmp_path / "r", "--json")[1])
    assert found["ranks"][7]["behind"] == 3
    assert found["ranks"][7]["place"] == "dp 3, tp 1"
    (finding,) = found["findings"]
    assert (finding["rule"], finding["ranks"], finding["step"]) == ("replicas", [5], 6)


def test_ranks_are_compared_with_those_that_do_the_same():
    random = np.random.default_rng(0)
    # each place along tp has another shard; rank 9 has the size of another shard
    value = np.array([10.0, 20.0] * 8)[:, None] * (1 + 0.01 * random.standard_normal((16, 30)))
    value[9] /= 2.5
    records = [
        Record("x", Kind.METRIC, step, 0, step, rank, 16, 0, value=value[rank, step])
        for rank, step in np.ndindex(value.shape)
    ]
    table = table_of(records)
    assert alike_groups(table) == [list(range(16))]
    assert not over_steps(table, "Metric", "x", "value").far[9].any()
    meshes = [f"dp={rank // 2}/8 tp={rank % 2}/2" for rank in range(16)]
    places = [
        Record("w", Kind.WEIGHT, 0, 0, 99, rank, 16, 0, tags={"mesh": mesh})
        for rank, mesh in enumerate(meshes)
    ]
    table = table_of([*records, *places])
    assert alike_groups(table) == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    far = over_steps(table, "Metric", "x", "value").far
    assert far[9].all()
    assert far.sum() == 30


def test_ranks_that_nothing_is_compared_with_are_counted():
    table = table_of(records(steps=3))
    assert uncompared(table) == ""
    few = table_of([r for r in records(steps=3) if r.rank < 3])
    assert uncompared(few) == "statistics of 3 ranks are not compared: fewer than 4 do the same"
    figure = ranks_figure(few, mesh_layout(few), kind="Weight", metric="rm2", name="w")
    assert figure["limits"] == uncompared(few)
