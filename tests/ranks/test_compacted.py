"""Ranks are compared by the roll-up of a compacted run: the answers are those of its parts."""

from __future__ import annotations

import json
import shutil

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

import tensortap as tap
from tensortap.capture.ticket import Ticket
from tensortap.cli.main import app
from tensortap.core.record import Kind, Record, Shard
from tensortap.rooms.compact import compact, rows
from tensortap.rooms.ranks import findings, suspects
from tensortap.rooms.ranks.findings import rank_findings
from tensortap.rooms.ranks.mesh import mesh_layout
from tensortap.rooms.ranks.ranks import over_names, over_steps, progress
from tensortap.runs.folders import end_run, make_run
from tensortap.runs.sink import StoreSink
from tests.ranks.test_rank_findings import SECOND, add_one, job, metrics, weights

LAYOUTS = ("parts", "one part", "compacted", "half", "late rows")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Four steps of eight ranks are a window."""
    monkeypatch.setattr(compact, "ROW_GROUP", 32)
    monkeypatch.setattr(rows, "ROW_GROUP", 32)
    monkeypatch.setattr(rows, "_TOGETHER", 40)
    monkeypatch.setattr(findings, "_LATE_SECONDS", 5)


def write(folder, records, layout, monkeypatch):
    """Write a run in one of the layouts."""
    monkeypatch.setattr("tensortap.runs.sink._TAIL_ROWS", 1000 if layout == "one part" else 20)
    ranks = sorted({record.rank for record in records})
    path = make_run(folder, len(ranks))
    middle = np.median([record.step for record in records])
    late = max(ranks) if layout == "late rows" else -1
    is_late = lambda each: each.step > middle or (each.rank == late and each.step == 1)
    sinks = {rank: StoreSink(path, rank) for rank in ranks}
    for is_second in (False, True):
        for rank, sink in sinks.items():
            own = [r for r in records if r.rank == rank and is_late(r) == is_second]
            for start in range(0, len(own), 20):
                sink.send([(record, Ticket(1), 0) for record in own[start : start + 20]])
                sink.hurry()
        if layout in ("half", "late rows"):
            tap.open(path).compact()
    if layout != "half":
        for sink in sinks.values():
            sink.close()
        end_run(path)
    if layout in ("compacted", "late rows"):
        assert tap.open(path).compact()
    return path


def answers(path):
    """Return what is said about the ranks of a run, and its table."""
    table = tap.open(path).table()
    made = [column.tolist() for column in progress(table)]
    found = rank_findings(table), made, mesh_layout(table)
    pages = []
    for kind in table.tensor_kinds():
        steps = table.steps(kind).tolist()
        pages += [over_steps(table, kind, name, "rm2") for name in table.layers(kind)[:2]]
        for step in {steps[0], steps[-1]}:
            matrix = over_names(table, kind, step, "rm2")
            names = [table.index().names[i] for i in matrix.columns.tolist()]
            pages.append((sorted(names), *matrix.select(np.argsort(names))[2:]))
    # as texts, in which NaN is equal to itself
    return (*found, [[repr(np.asarray(c).tolist()) for c in page] for page in pages]), table


def swapped(rank, step, name, values):
    if rank == 1 and step == 4 and name == "fc.bias":
        values[:] = values[::-1].copy()


def mesh(rank):
    return {"mesh": f"dp={rank // 2}/4 tp={rank % 2}/2", "placements": "R S(0)"}


def calls():
    """Yield a layer that is called twice, the second time not on every rank."""
    for record in job():
        yield record
        if record.rank < 5:
            stats = msgspec.structs.replace(record.stats, rm2=9.0)
            yield msgspec.structs.replace(record, call=1, seq=record.seq + 5, stats=stats)


CASES = {
    "healthy": lambda: [*weights(), *job()],
    "wrong weight": lambda: [*weights(add_one([2], 3)), *job(kind=Kind.GRADIENT)],
    "digests": lambda: weights(swapped, world=3, digests=True),
    "no majority": lambda: weights(add_one([1], 2), world=2),
    "two at once": lambda: weights(add_one([5, 6], 1, ("fc.weight", "fc.bias"))),
    "own models": lambda: weights(lambda rank, step, name, values: values.__iadd__(rank)),
    "gradients": lambda: [
        *weights(add_one([1], 0), world=2),
        *(msgspec.structs.replace(r, kind=Kind.WEIGHT_GRADIENT, seq=r.seq + 2)
          for r in weights(world=2)),
    ],
    "shards": lambda: [
        msgspec.structs.replace(r, shard=Shard((128,), (64 * (r.rank % 2),), ("R", "S(0)")))
        for r in weights(lambda rank, step, name, values: (
            values.__iadd__(rank % 2), add_one([3], 2)(rank, step, name, values)), world=4)
    ],
    "far": lambda: job(size=lambda rank, step, _: 5.0 if rank == 6 and step >= 4 else 1.0),
    "not far": lambda: job(size=lambda rank, *_: 1.8 if rank == 6 else 1.0),
    "nan": lambda: job(size=lambda rank, *_: np.nan if rank == 3 else 1.0),
    "all nan": lambda: job(size=lambda *_: np.nan),
    "zeros": lambda: job(size=lambda rank, *_: float(rank == 0)),
    "mesh": lambda: [
        *job(size=lambda rank, *_: 1.0 + 9 * (rank % 2)),
        *(msgspec.structs.replace(r, tags=mesh(r.rank)) for r in weights()),
    ],
    "behind": lambda: job(30, ends={3: 5}),
    "slow": lambda: [
        Record("x", Kind.METRIC, step, 0, step, rank, 8, (step * (3 if rank == 1 else 1)) * SECOND,
               value=0.5)
        for step in range(40) for rank in range(8) if rank != 1 or step <= 13
    ],
    "metrics": lambda: metrics(
        1 + 0.01 * np.random.default_rng(0).standard_normal((12, 8, 2))
        + 9 * (np.arange(8) == 5)[None, :, None]
    ),
    "calls": calls,
}  # fmt: skip
FINE = ("healthy", "own models", "not far", "all nan", "mesh")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_layout_gives_the_same_answers(case, tmp_path, monkeypatch):
    records = list(CASES[case]())
    found = {}
    for layout in LAYOUTS:
        path = write(tmp_path / layout, records, layout, monkeypatch)
        found[layout], table = answers(path)
        assert found[layout] == found["parts"], layout
        if layout == "compacted":
            assert not table._is_read, "all rows of a compacted run were read"
            done = CliRunner().invoke(app, ["ranks", str(path), "--json"])
            said = json.loads(done.stdout)["findings"]
            assert said == json.loads(msgspec.json.encode(found[layout][0]))
            if case == "healthy":
                assert not suspects.suspects(table)
    assert bool(found["parts"][0]) == (case not in FINE)


def test_nothing_but_the_suspects_is_read(tmp_path, monkeypatch):
    """Without them, the files with records may be lost."""
    path = write(tmp_path, [*weights(), *job(6)], "compacted", monkeypatch)
    for file in (path / "compact").glob("*/records.parquet"):
        file.unlink()
    for folder in (path / "records").iterdir():
        shutil.rmtree(folder)
        folder.mkdir()
    assert tap.open(path).ranks() == []
