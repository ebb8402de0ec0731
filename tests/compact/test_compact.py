"""Compaction: sorted windows with a roll-up say what the parts of the run say."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest

import tensortap as tap
from tensortap.capture.ticket import Ticket
from tensortap.core.errors import TensortapError
from tensortap.core.record import Kind, Record, Shard
from tensortap.rooms.compact import compact, rows
from tensortap.runs import windows
from tensortap.runs.folders import end_run, make_run
from tensortap.runs.sink import StoreSink
from tensortap.stats import summarize_array
from tensortap.table.columns import exponents

KEY = ["name", "kind", "step", "call", "rank"]


def records_of(rank, steps, ranks=4):
    """Return sharded weights, activations of a batch, replicas, a metric and a caught value."""
    seq = 0
    for step in steps:
        rng = np.random.default_rng([step + 1, rank])
        same = np.random.default_rng(step + 1)
        whole = same.standard_normal((8, 4)).astype("f4")
        shard = Shard((8, 4), (2 * rank, 0), ("S(0)",))
        own = whole[2 * rank : 2 * rank + 2]
        bias = same.standard_normal(4).astype("f4")
        if rank == 2 and step == 7:
            bias = bias * 2
        act = rng.standard_normal((3, 4)).astype("f4")
        act[0, 0] = np.nan if step == 5 else 1.0
        for name, kind, value, place in (
            ("z.weight", Kind.WEIGHT, own, shard), ("z.bias", Kind.WEIGHT, bias, None),
            ("a", Kind.ACTIVATION, act, None), ("a", Kind.ACTIVATION, act * 2, None),
        ):  # fmt: skip
            call = int(value is not act and kind is Kind.ACTIVATION)
            time_ns = 10**9 * step + seq
            yield Record(name, kind, step, call, seq, rank, ranks, time_ns, "", "float32",
                         value.shape, place, stats=summarize_array(value))  # fmt: skip
            seq += 1
        for name, kind, value in (
            ("loss", Kind.METRIC, step / 10 + rank),
            ("note", Kind.VALUE, "x"),
        ):
            yield Record(name, kind, step, 0, seq, rank, ranks, 10**9 * step + seq, value=value)
            seq += 1


def write(sink, records):
    sink.send([(record, Ticket(1), 0) for record in records])
    sink.hurry()


@pytest.fixture
def small_windows(monkeypatch):
    """Four steps of four ranks are a window, and eighteen rows a part."""
    monkeypatch.setattr(compact, "ROW_GROUP", 16)
    monkeypatch.setattr(rows, "ROW_GROUP", 16)
    monkeypatch.setattr(rows, "_TOGETHER", 20)
    monkeypatch.setattr("tensortap.runs.sink._TAIL_ROWS", 18)


@pytest.fixture
def run(tmp_path, small_windows):
    path = make_run(tmp_path, 4)
    for rank in range(4):
        sink = StoreSink(path, rank)
        records = list(records_of(rank, range(-1, 14)))
        for first in range(0, len(records), 7):  # more than a step
            write(sink, records[first : first + 7])
        sink.note_dropped("late", Kind.VALUE, 3, rank)
        sink.close()
    end_run(path)
    return path


def frame(found):
    return found.sort_values(KEY).reset_index(drop=True)


def said(path):
    """Return the frames of a run, and everything else that it says."""
    run = tap.open(path)
    table, series = run.table(), []
    whole = table.whole()
    for kind, name in (("Activation", "a"), ("Weight", "z.weight"), ("Weight", "z.bias")):
        rows = whole.series(kind, name)
        shapes = whole.take(rows, ["shape"]).column(0).to_pylist()
        counts = exponents(whole, rows).counts.tolist()
        series.append((whole.step[rows].tolist(), counts, shapes))
    kinds = ("Activation", "Weight", "Metric", None)
    frames = [frame(tap.open(path).stats(rank=rank)) for rank in (None, "all", 2)]
    return [*frames, run.metrics()], (
        list(run.reader.counts().items()), run.missing(), table.ranks(), series,
        [(table.layers(kind), table.steps(kind).tolist()) for kind in kinds],
        run.reader.records("a", step=3, rank=1), run.reader.records("z.bias", step=13, rank=2),
    )  # fmt: skip


said_without_windows = functools.cache(said)


def check_same(path, plain):
    """Compare everything that a run says with the same run without windows."""
    assert tap.open(path).reader.windows
    (frames, rest), (expected, others) = said(path), said_without_windows(plain)
    for one, other in zip(expected, frames, strict=True):
        pd.testing.assert_frame_equal(one, other, check_exact=True)
    assert rest == others


@pytest.fixture
def plain(run, tmp_path):
    """The same run without windows."""
    return shutil.copytree(run, tmp_path / "plain")


def test_windows_say_what_parts_say(run, plain):
    assert tap.open(run).compact() == 4
    assert sorted(path.name for path in (run / "compact").iterdir()) == [
        "-1-3",
        "12-13",
        "4-7",
        "8-11",
    ]
    check_same(run, plain)
    table = tap.open(run).table()
    assert len(table.near([("Weight", "z.bias")])) < len(table.whole())
    assert not table._is_read  # neither has loaded all rows
    assert tap.open(run).compact() == 0


def test_rows_are_sorted_and_the_roll_up_tells_about_ranks(run):
    import pyarrow.parquet as pq

    tap.open(run).compact()
    for folder in (run / "compact").iterdir():
        for file in ("records.parquet", "whole.parquet"):
            found = pq.read_table(folder / file).to_pandas()
            by = ["kind", "name", "step", "rank", "call", "seq"]
            assert found[by].equals(found[by].sort_values(by).reset_index(drop=True))
    whole = pq.read_table(run / "compact/4-7/whole.parquet").to_pandas()
    bias = whole[whole["name"] == "z.bias"].set_index("step")
    assert bias["differs"].groupby("step").any().tolist() == [False, False, False, True]
    assert (bias.loc[7, "far_rank"] == 2).all()
    assert bias.loc[7, "far"].iloc[0] == pytest.approx(1.0)
    assert set(whole.loc[whole["name"] == "z.weight", "records"]) == {4}


def test_grows_while_it_is_compacted(tmp_path, small_windows):
    path, other = make_run(tmp_path, 4), make_run(tmp_path, 4)
    sinks = {(each, rank): StoreSink(each, rank) for each in (path, other) for rank in range(4)}
    records = {rank: list(records_of(rank, range(-1, 14))) for rank in range(4)}
    opened = None
    for step in range(-1, 14):
        for (_, rank), sink in sinks.items():
            new = [r for r in records[rank] if r.step == step]
            if (rank, step) == (3, 2):
                continue
            write(sink, new)
            if (rank, step) == (3, 9):  # long after the window of its step was written
                write(sink, [r for r in records[rank] if r.step == 2])
        tap.open(path).compact()
        if step == 5:
            opened = tap.open(path)
            table = opened.table().whole()
            assert opened.reader.windows
        if opened is not None:
            table.refresh()
            assert table.steps("Metric").max() == step
    assert len(tap.open(path).reader.windows) == 3
    check_same(path, other)
    for sink in sinks.values():
        sink.close()
    for each in (path, other):
        end_run(each)
    tap.open(path).compact()
    check_same(path, other)
    # rows of step 2 that came late are merged with those in the window
    whole = tap.open(path).table().whole()
    rows = whole.rows(kind="Weight", names=["z.weight"], step=2)
    assert whole.column("count")[rows].tolist() == [32.0]


def test_single_rank_and_no_rows(tmp_path, small_windows):
    path = make_run(tmp_path, 1)
    assert tap.open(path).compact() == 0
    sink = StoreSink(path, 0)
    write(sink, list(records_of(0, range(3), 1)))
    sink.close()
    end_run(path)
    plain = shutil.copytree(path, tmp_path / "plain")
    assert tap.open(path).compact() == 1
    one, other = (frame(tap.open(each).stats()) for each in (path, plain))
    pd.testing.assert_frame_equal(one, other, check_exact=True)
    assert tap.open(path).table().layers() == tap.open(plain).table().layers()


def test_executor_and_two_compactors_at_once(run, plain):
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(compact.compact_run, tap.open(run).reader) for _ in range(3)]
        assert [future.result() for future in futures]
    check_same(run, plain)
    assert not list((run / "compact").glob(".*"))
    shutil.rmtree(run / "compact")
    with ThreadPoolExecutor(2) as pool:
        assert tap.open(run).compact(pool) == 4
    check_same(run, plain)


@pytest.mark.parametrize("most", [(60, 1000), (1000, 16)])
def test_windows_are_bounded(run, plain, monkeypatch, most):
    """Many names, or many calls of one, make windows narrower: of two steps instead of four."""
    monkeypatch.setattr(compact, "_MOST_ROWS", most)
    tap.open(run).compact()
    found = [window.manifest for window in tap.open(run).reader.windows]
    assert len(found) >= 8
    assert max(each.rows for each in found) <= 4 * 6 * 2
    check_same(run, plain)


@pytest.mark.slow
@pytest.mark.fault("two compactors of the same run at once")
def test_processes_that_compact_at_once(run, plain, rounds):
    """Each starts over and over while the other writes; neither removes what the other writes."""
    mkdir = compact.Path.mkdir

    def slowly(path, *arguments, **options):
        mkdir(path, *arguments, **options)
        time.sleep(0.003)  # before a draft is locked

    for _ in range(rounds(3, 20)):
        shutil.rmtree(run / "compact", ignore_errors=True)
        pids = []
        for _ in range(2):
            pids.append(os.fork())
            if not pids[-1]:
                status = 1
                try:
                    compact.Path.mkdir = slowly
                    for _ in range(5):
                        compact.compact_run(tap.open(run).reader)
                        shutil.rmtree(run / "compact/4-7", ignore_errors=True)
                    status = 0
                finally:
                    os._exit(status)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
        tap.open(run).compact()
        assert len(tap.open(run).reader.windows) == 4
        assert not list((run / "compact").glob(".*"))
    check_same(run, plain)


def test_two_compactors_of_a_run_that_grows(tmp_path, small_windows):
    """A window that one has written from fewer parts does not hide what the other has read."""
    path = make_run(tmp_path, 4)
    sinks = [StoreSink(path, rank) for rank in range(4)]

    def grow(steps):
        for rank, sink in enumerate(sinks):
            write(sink, [r for r in records_of(rank, range(-1, 16)) if (r.step, rank) in steps])

    grow({(step, rank) for step in range(-1, 9) for rank in range(4)} - {(2, 3)})
    early = compact.plan_windows(tap.open(path).reader)
    grow({(2, 3)})
    for steps in (range(9, 12), range(12, 16)):  # each becomes a part
        grow({(step, rank) for step in steps for rank in range(4)})
    late = compact.plan_windows(tap.open(path).reader)
    (path / "compact").mkdir()
    for job in (*early, *late[len(early) :]):
        compact.write_window(job)
    assert len(tap.open(path).reader.windows) == len(late) > len(early) > 0
    for sink in sinks:
        sink.close()
    end_run(path)
    plain = tmp_path / "plain"
    shutil.copytree(path, plain, ignore=shutil.ignore_patterns("compact"))
    check_same(path, plain)
    tap.open(path).compact()
    check_same(path, plain)


@pytest.mark.slow
@pytest.mark.fault("compaction killed at any moment")
def test_killed_at_random_moments(run, plain, rounds):
    """Each process is told to start, and killed a little later; the last one finishes."""
    rng = random.Random(0)
    killed, attempts = 0, rounds(30, 100)
    for attempt in range(attempts):
        pid = os.fork()
        if not pid:  # a fork, because an interpreter takes a second to start
            try:
                compact.compact_run(tap.open(run).reader)
            finally:
                os._exit(0)
        time.sleep(rng.random() * 0.15)
        os.kill(pid, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        reader = tap.open(run).reader
        assert sum(reader.counts().values()) == 4 * 15 * 6
        if attempt % 15 == 14 and reader.windows:
            check_same(run, plain)
        if len(reader.windows) == 4:
            shutil.rmtree(run / "compact")
    assert killed > attempts / 2
    tap.open(run).compact()
    check_same(run, plain)
    assert not list((run / "compact").glob(".*"))


def test_run_that_cannot_be_written_to(run):
    (run / "compact").write_text("")  # also for root, who may write into read-only folders
    with pytest.raises(TensortapError, match="cannot write into"):
        tap.open(run).compact()
    assert len(tap.open(run).stats()) > 0


@pytest.mark.attack("manifests and windows that lie")
def test_hostile_windows(run, plain):
    tap.open(run).compact()
    manifest = run / "compact/4-7/manifest.json"
    good = json.loads(manifest.read_text())
    for change in (
        {"first": 5}, {"last": 1 << 70}, {"format": 2}, {"parts": []}, {"rows": -1}, {"names": 3},
    ):  # fmt: skip
        manifest.write_text(json.dumps({**good, **change}))
        assert len(tap.open(run).reader.windows) == 3
    check_same(run, plain)
    for text in ("", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass").decode("latin1")):
        manifest.write_text(text)
        assert len(tap.open(run).reader.windows) == 3
    check_same(run, plain)
    manifest.write_text(json.dumps({**good, "rows": good["rows"] + 1}))
    with pytest.raises(TensortapError, match="rows, not"):
        tap.open(run).stats(rank="all")
    manifest.write_text(json.dumps(good))
    overlapping = run / "compact/6-9"
    shutil.copytree(run / "compact/4-7", overlapping)
    (overlapping / "manifest.json").write_text(json.dumps({**good, "first": 6, "last": 9}))
    check_same(run, plain)
    for file in ("whole.parquet", "records.parquet"):
        path = run / "compact/4-7" / file
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(TensortapError, match=file):
            tap.open(run).stats(rank="all" if file == "records.parquet" else None)
        path.unlink()
        path.symlink_to("/etc/passwd")
        with pytest.raises(TensortapError, match="leads out of"):
            tap.open(run)
        path.unlink()
        path.write_bytes(data)
    check_same(run, plain)


def test_names_of_windows():
    assert windows._NAME.fullmatch("-1-3")
    assert not windows._NAME.fullmatch(".-1-3.ab")


def test_command(run):
    done = subprocess.run(
        [sys.executable, "-m", "tensortap", "compact", str(run)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "windows" in done.stderr + done.stdout
    assert tap.open(run).reader.windows


def test_queries_of_the_documentation(run):
    """What docs/format.md shows, with DuckDB and with pandas."""
    import re
    from pathlib import Path

    import duckdb

    tap.open(run).compact()
    text = (Path(__file__).parents[2] / "docs/format.md").read_text()
    queries = re.findall(r"SELECT[^;]*compact/[^;]*;", text)
    found = [duckdb.sql(each.replace("compact/", f"{run}/compact/")).fetchall() for each in queries]
    steps, differing, means = found
    assert sorted({step for step, _ in steps}) == list(range(-1, 14))
    assert {row[:2] for row in differing} == {("z.bias", 7)}
    assert [rank for rank, _ in means] == [0, 1, 2, 3]
    files = sorted((run / "compact").glob("*/whole.parquet"))
    frames = pd.concat(pd.read_parquet(file, columns=["name", "step", "rm2"]) for file in files)
    assert len(frames[frames["name"] == "a"]) == len(steps)
