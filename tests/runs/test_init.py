"""`init` creates a run, and everything captured afterwards goes into it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import duckdb
import pytest
from safetensors import safe_open

import tensortap as tap
from tensortap.core.errors import TensortapError
from tensortap.runs.folders import make_run
from tensortap.runs.layout import NotARun, write_json

pytestmark = pytest.mark.slow

TRAINING = """
    import torch, tensortap as tap
    path = tap.init("experiments")
    hidden = torch.zeros(100, 100)
    for step in range(50):
        hidden += 1
        tap.catch(hidden, "hidden", every=10)
        tap.catch(float(step), "loss")
    print(path)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, run_program):
    """The finished run of that program."""
    folder = tmp_path_factory.mktemp("training")
    return tap.open(folder / run_program(folder, TRAINING).strip())


def test_run_is_named_after_the_time_and_holds_what_was_caught(run):
    assert re.fullmatch(r"\d{8}_\d{6}", run.path.name)
    assert run.path.parent.name == "experiments"
    assert run.names() == ["hidden", "loss"]
    assert (run.get("hidden", step=40) == 41).all()
    assert (run.get("hidden", 1) == 31).all()
    assert [value[0, 0].item() for value in run.get_all("hidden")] == [1, 11, 21, 31, 41]
    assert run.get_all("loss") == [float(step) for step in range(50)]
    assert run.reader.info.ended is not None
    assert run.missing() == []


def test_get_returns_a_copy(run):
    run.get("hidden", step=0).zero_()
    assert (run.get("hidden", step=0) == 1).all()


def test_stats_computes_missing_statistics(run):
    frame = run.stats()
    assert len(frame) == 55
    row = frame[(frame.name == "hidden") & (frame.step == 20)].iloc[0]
    assert (row["mean"], row["std"], row["count"]) == (21.0, 0.0, 10_000)
    assert frame[frame.name == "loss"].value.tolist() == [float(step) for step in range(50)]


def test_duckdb_and_safetensors_read_a_run(run):
    tables = f"{run.path}/records/*/*.parquet"
    losses = duckdb.sql(f"SELECT number FROM '{tables}' WHERE name = 'loss' ORDER BY step")
    assert [row[0] for row in losses.fetchall()] == [float(step) for step in range(50)]
    where = duckdb.sql(f"SELECT payloads FROM '{tables}' WHERE name = 'hidden' AND step = 40")
    (place,) = where.fetchall()[0][0]
    with safe_open(run.path / "tensors" / place["file"], "pt") as file:
        assert (file.get_tensor(place["key"]) == 41).all()


def test_runs_of_the_same_second_get_a_number(tmp_path):
    paths = [make_run(tmp_path, 1) for _ in range(3)]
    assert len({path.name for path in paths}) == 3
    assert sum("_2" in path.name[15:] for path in paths) >= 1


def test_follow_yields_new_records_and_ends_with_the_run(program, tmp_path):
    out = program("""
        import subprocess, sys, tensortap as tap
        path = tap.init("runs")
        tap.catch(0.0, "x"); tap.flush(60)
        code = (
            "import sys, tensortap as tap\\n"
            "for r in tap.open(sys.argv[1] + '/').follow(60):\\n"
            "    print(r.step, r.value, flush=True)"
        )
        command = [sys.executable, "-c", code, str(path)]
        follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert follower.stdout.readline() == "0 0.0\\n"
        tap.catch(1.0, "x"); tap.flush(60)
        assert follower.stdout.readline() == "1 1.0\\n"
        tap.finish()
        assert follower.wait(60) == 0
        print("ended")
    """)
    assert out.strip() == "ended"


def test_next_run_starts_at_step_0(program):
    out = program("""
        import tensortap as tap
        paths = []
        for _ in range(2):
            paths.append(tap.init("runs"))  # ends the first run
            tap.catch(1.0, "before", every=2)
            for step in range(3):
                tap.catch(step, "x", first=2)
                tap.step()
        tap.finish()
        for path in paths:
            run = tap.open(path)
            print([(r.name, r.step) for r in run.records()])
        print(tap.receipt().captured, tap.receipt().skipped)
    """)
    one, two, counts = out.splitlines()
    assert one == two == "[('before', 0), ('x', 0), ('x', 1)]"
    assert counts == "6 2"


def test_forked_child_does_not_write_into_the_run_of_its_parent(program):
    out = program("""
        import os, tensortap as tap
        path = tap.init("runs")
        tap.catch(1.0, "x"); tap.flush(60)
        child = os.fork()
        if not child:
            tap.catch(2.0, "x")
            try:
                tap.dump(1, "y")
            except tap.TensortapError as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        tap.catch(3.0, "x")
        tap.finish()
        print(tap.open(path).get_all("x"))
    """)
    assert out.split("\n")[:2] == ["no run is open: call tap.init('runs') first", "[1.0, 3.0]"]


# -- bad input -------------------------------------------------------------------------------


def test_rejects_folder_that_is_not_a_run(tmp_path):
    with pytest.raises(NotARun, match="is not a run"):
        tap.open(tmp_path)
    with pytest.raises(NotARun, match="is not a run"):
        tap.open(tmp_path / "not there")


def test_newer_format_advises_to_upgrade(tmp_path):
    write_json(tmp_path / "run.json", {"format": 99})
    with pytest.raises(NotARun, match=r"format 99, but this tensortap reads only up to 1: upgrade"):
        tap.open(tmp_path)


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TensortapError, match="cannot create a run"):
        tap.init(tmp_path / "file" / "runs")


NAMES = [
    "a/b",
    "../../etc/passwd",
    "..",
    ".hidden",
    "nul\0byte",
    "x" * 300,
    "🔥 emoji",
    "CON",
    "a\nb",
    "%2F",
]


def test_any_name_is_stored_inside_the_run(program, tmp_path):
    out = program(f"""
        import torch, tensortap as tap
        path = tap.init("runs")
        for i, name in enumerate({NAMES!r}):
            tap.catch(torch.full((10_000,), float(i)), name)
            tap.dump(i, name)
        print(path)
    """)
    run = tap.open(tmp_path / out.strip())
    assert run.names() == NAMES
    for i, name in enumerate(NAMES):
        assert run.get(name, trust=True) == i
        assert (run.get(name, 1) == i).all()
    outside = [p.name for p in tmp_path.iterdir() if not p.name.startswith("program.py")]
    assert outside == ["runs"]
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {run.path.name}


@pytest.mark.attack("path outside a folder")
def test_rejects_payload_outside_the_run(run):
    from tensortap.core.files import CorruptFile

    with pytest.raises(CorruptFile, match="leads out of"):
        run.reader._payloads.view("../../../../etc/passwd", "x")
    assert Path("/etc/passwd").exists()


def test_invalid_server_address_does_not_affect_the_run(program):
    code = """
        import logging, numpy as np, tensortap as tap
        logging.basicConfig(format="%(message)s", stream=__import__("sys").stdout)
        path = tap.init("runs")
        for i in range(3):
            tap.catch(float(i), "loss")
            tap.catch(np.full(100_000, i), "x")
        tap.finish()
        run = tap.open(path)
        print(run.get_all("loss"), len(run.get_all("x")), tap.receipt().reasons["error"])
    """
    said = program(code, env={"TENSORTAP_SERVER": "here:there"}).splitlines()
    assert said[0].startswith("tensortap: not connecting to TENSORTAP_SERVER: port must be")
    assert said[1:] == ["[0.0, 1.0, 2.0] 3 0"]


def test_paths_hold_after_a_change_of_the_working_directory(program, tmp_path):
    out = program(
        """
        import os, numpy as np, tensortap as tap
        os.mkdir("sub")
        path, films = tap.init("runs"), tap.Recorder("films", size=(160, 120), format="gif")
        traced = tap.HDF5("traced.h5")
        os.chdir("sub")
        for i in range(120):
            tap.catch(np.full(2000, i), "x")
        assert tap.flush(60)
        assert tap.dump(np.ones(3), "y").is_absolute()
        tap.finish()
        os.chdir("..")
        run = tap.open(os.path.relpath(path))
        os.chdir("sub")
        assert len(run.get_all("x")) == 120
        run.reader.refresh()
        for record in run.reader.records("x", last=2):
            films(run.reader.load(record))
        films.close()
        traced("a", [np.ones(2)], [0], [0])
        traced.close()
        os.chdir("..")
        run = tap.open(os.path.relpath(path))
        os.chdir("sub")
        print(len(run.get_all("x")), run.get("y").sum(), tap.receipt().dropped)
        """
    )
    assert out.split() == ["120", "3.0", "0"]
    found = {path.name for path in tmp_path.iterdir()}
    assert {"runs", "films", "traced.h5"} <= found
    assert not list((tmp_path / "sub").iterdir())


REPLACED = """
import os, shutil, sys, numpy as np, tensortap as tap
from tensortap.rooms.provenance import update_metadata
how = sys.argv[1]
run = tap.init("runs")
run.parent.joinpath("other").mkdir()
update_metadata()  # provenance is written before
for i in range(100):
    tap.catch(np.full(3000 if i % 2 else 3, i), "x")
assert tap.flush(60)
moved = run.with_name("moved")
if how == "deleted":
    shutil.rmtree(run)
elif how == "tables":
    shutil.rmtree(run / "records")
else:
    run.rename(moved)
if how == "copied":
    shutil.copytree(moved, run)
elif how == "link":
    shutil.copytree(moved, run.with_name("copy"))
    run.symlink_to(run.with_name("copy"))
elif how == "moved":
    run.symlink_to(moved)
before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
for i in range(200):
    tap.catch(np.full(3000 if i % 2 else 3, i), "x")
flushed, dumped = tap.flush(60), tap.dump(np.ones(3), "y")
tap.finish()
receipt = tap.receipt()
written = {p.name for p in run.rglob("*") if before.get(p) != p.stat().st_mtime_ns}
print([flushed, dumped is not None, receipt.captured, receipt.dropped, len(written) > 0])
"""


@pytest.mark.fault("the folder of a run removed or replaced while it is written")
@pytest.mark.parametrize("how", ["deleted", "tables", "renamed", "copied", "link", "moved"])
def test_folder_that_is_removed_or_replaced(program, how):
    found = json.loads(program(REPLACED, how).replace("T", "t").replace("F", "f"))
    if how == "moved":  # and linked: it is the same folder
        assert found == [True, True, 301, 0, True]
    elif how == "tables":  # other files still go into the folder
        assert found == [False, True, 100, 201, True]
    else:
        assert found == [False, False, 100, 201, False]


def test_error_for_folder_of_runs_names_the_latest(tmp_path, run):
    with pytest.raises(NotARun, match=f"it contains 1 runs, the latest is .*{run.path.name}"):
        tap.open(run.path.parent)
    with pytest.raises(NotARun, match=r"is not a run: it has no run\.json$"):
        tap.open(tmp_path)


def test_run_contains_receipt(program):
    code = """
        import numpy as np, tensortap as tap
        paths = []
        for count in (5, 2):
            paths.append(tap.init("runs"))
            for i in range(count):
                tap.catch(np.ones(100_000), "x", every=2)
                tap.step()
            print(tap.open(paths[-1]).reader.receipts())
            tap.finish()
        first, second = (tap.open(path).receipt() for path in paths)
        print(first.captured, first.skipped, first.steps, first.bytes)
        print(second.captured, second.skipped, second.steps, second.bytes)
        print(0 < second.seconds < first.seconds + 60, first.activities["copy"] > 0)
        try:
            tap.open(paths[0]).receipt(3)
        except tap.TensortapError as error:
            print(error)
    """
    *before, one, two, times, said = program(code).splitlines()
    assert before == ["{}", "{}"]
    assert (one, two) == ("3 2 5 2400000", "1 1 2 800000")
    assert times == "True True"
    assert "no receipt of rank 3" in said
    assert said.endswith("there are receipts of ranks 0")
