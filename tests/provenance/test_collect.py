"""Provenance files are complete, versioned when they change, and never disturb training."""

import json
import os
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest

from tensortap.rooms.provenance import Keeper, collect, modifications, runtime, stored
from tests.processes import wait_for

pytestmark = pytest.mark.slow

FILES = {"runtime_info.json", "packages.json", "git_info.json"}
NOT_EDITABLE = "from tensortap.rooms.provenance import runtime; runtime._origin = lambda *_: {}"


@pytest.fixture(autouse=True)
def not_editable(monkeypatch):
    """tensortap is editable here, and somebody may be editing it while the tests run."""
    monkeypatch.setattr(runtime, "_origin", lambda *_: {})


@pytest.fixture(autouse=True)
def few_modules(monkeypatch):
    """Search only one module: the tests have imported many."""
    modules = {"textwrap": textwrap}
    monkeypatch.setattr(modifications, "sys", SimpleNamespace(modules=modules))


def names(folder):
    return {file.name for file in folder.iterdir()}


def read(folder, name):
    return json.loads((folder / name).read_text())


@pytest.fixture
def run(repo):
    """A run folder inside the repository, as init("experiments") creates it."""
    folder = repo.path / "experiments" / "20261115_181530"
    folder.mkdir(parents=True)
    return folder


def test_clean_project(repo, run):
    collect(run, start=repo.path, modifications=False)
    assert names(run) == FILES
    info = read(run, "git_info.json")
    assert info["project_git_info"]["status"] == "clean"
    assert info["runtime_modifications"] == {}
    assert info["runtime_modifications_checked"] is False
    before = {name: (run / name).stat().st_mtime_ns for name in names(run)}
    collect(run, start=repo.path, modifications=False)  # nothing has changed
    assert {name: (run / name).stat().st_mtime_ns for name in names(run)} == before


def test_changes_create_versions(repo, run, monkeypatch):
    def again():
        collect(run, start=repo.path, modifications=False)

    repo.write("model.py", "one\n")
    again()
    repo.write("model.py", "two\n")
    again()
    assert names(run) == FILES | {"project.patch", "git_info.1.json", "project.1.patch"}
    assert read(run, "git_info.1.json")["project_git_info"]["git_diff"] == "See project.1.patch"
    assert "+one" in (run / "project.1.patch").read_text()
    assert "+two" in (run / "project.patch").read_text()
    repo.commit("clean again")
    again()
    assert names(run) == FILES | {
        "git_info.1.json", "project.1.patch", "git_info.2.json", "project.2.patch",
    }  # fmt: skip
    assert read(run, "git_info.json")["project_git_info"]["git_diff"] == ""
    monkeypatch.setenv("LEARNING_RATE", "0.1")
    again()
    assert "LEARNING_RATE" not in read(run, "runtime_info.1.json")["environment_variables"]
    assert read(run, "runtime_info.json")["environment_variables"]["LEARNING_RATE"] == "0.1"


def test_number_of_versions_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "KEPT", 3)
    for number in range(6):
        stored.write(tmp_path, "x", {"number": number}, keep=True)
    assert names(tmp_path) == {"x.json", "x.1.json", "x.2.json", "x.3.json"}
    assert read(tmp_path, "x.json") == {"number": 5}
    assert read(tmp_path, "x.1.json") == {"number": 0}


def test_package_imported_later_creates_no_version(python, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    python(
        f"""
        import sys
        from tensortap.rooms.provenance import collect
        {NOT_EDITABLE}
        collect(sys.argv[1], modifications=False)
        import scipy
        collect(sys.argv[1], modifications=False)
        """,
        str(run),
    )
    assert names(run) == FILES
    assert "scipy" in read(run, "packages.json")["packages"]


def test_logs_unwritable_folder_once(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("TENSORTAP_STRICT", raising=False)
    keeper = Keeper(tmp_path / "gone", start=tmp_path, interval=0.0)
    assert keeper.update_now()
    assert keeper.update_now()
    assert keeper.close(60)
    messages = [r.getMessage() for r in caplog.records if r.name == "tensortap"]
    assert len(messages) == len(set(messages)) == 3


def test_strict_mode_raises(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORTAP_STRICT", "1")
    with pytest.raises(OSError, match="gone"):
        collect(tmp_path / "gone", start=tmp_path)


def test_keeper_writes_changes(repo, run):
    keeper = Keeper(run, start=repo.path, interval=0.0)
    assert (run / "runtime_info.json").exists()  # before it returns
    assert keeper.update_now()
    assert names(run) == FILES
    assert read(run, "git_info.json")["runtime_modifications_checked"] is True
    repo.write("model.py", "changed\n")
    assert keeper.update_now()
    assert names(run) == FILES | {"git_info.1.json", "project.patch"}
    repo.write("model.py", "changed again\n")
    keeper.update()
    assert keeper.close(60)  # after the requested check
    assert "+changed" in (run / "project.2.patch").read_text()  # the first had none
    assert "+changed again" in (run / "project.patch").read_text()
    keeper.update()
    assert keeper.update_now()
    assert keeper.close(60)


def test_update_metadata_describes_the_moment_of_the_call(python, repo, tmp_path):
    python(
        f"""
        import sys, textwrap
        import tensortap as tap
        from tensortap.runs.init import current
        {NOT_EDITABLE}
        tap.init(sys.argv[1])
        assert current().keepers[0].update_now()
        def mine(text, width=70): return text
        original, textwrap.fill = textwrap.fill, mine
        tap.rooms.provenance.update_metadata()
        textwrap.fill = original
        tap.rooms.provenance.update_metadata()
        tap.finish()
        """,
        str(tmp_path / "runs"),
        cwd=repo.path,
    )
    (run,) = (tmp_path / "runs").iterdir()
    own = "tensortap.rooms.provenance.runtime._origin"  # patched by this test
    found = [read(run, f"git_info{n}.json")["runtime_modifications"] for n in (".1", ".2", "")]
    assert [set(each) for each in found] == [{own}, {own, "textwrap.fill"}, {own}]


def test_warning_names_what_is_missing(tmp_path, caplog, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(modifications.Finder, "find", lambda *_: ended.wait(60) and {})
    keeper = Keeper(tmp_path, start=tmp_path)  # no repository
    wait_for((tmp_path / "git_info.json").exists)
    assert not keeper.close(0.1)
    ended.set()
    assert "not complete: searching for monkey patches took more than 0 s" in caplog.text


def test_checks_wait_for_the_interval(repo, run):
    keeper = Keeper(run, start=repo.path, interval=3600.0)
    wait_for(lambda: keeper.checks)
    for _ in range(1000):
        keeper.update()
    time.sleep(0.3)
    assert keeper.checks == 1
    assert keeper.update_now()
    assert keeper.checks == 2
    assert keeper.close(60)


def test_keeper_does_nothing_in_a_forked_child(repo, run):
    keeper = Keeper(run, start=repo.path, interval=0.0)
    assert keeper.update_now()
    with keeper._changed:  # a lock that another thread holds is never released in the child
        child = os.fork()
        if child == 0:
            keeper.update()
            keeper.update_now()
            keeper.close()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert keeper.close(60)


def test_error_does_not_end_the_keeper(repo, run, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["tensortap.rooms.provenance.keeper"], "packages_info", broken)
        keeper = Keeper(run, start=repo.path, interval=0.0)
        assert keeper.update_now()
    assert names(run) == FILES - {"packages.json"}
    assert keeper.update_now()
    assert names(run) == FILES
    assert "broken" in caplog.text
    assert keeper.close(60)


def test_readers_see_complete_files(tmp_path):
    done = threading.Event()
    seen = []

    def watch():
        while not done.is_set():
            for file in tmp_path.glob("*.json"):
                try:
                    seen.append(len(json.loads(file.read_text())["text"]))
                except FileNotFoundError:
                    continue

    reader = threading.Thread(target=watch)
    reader.start()
    for number in range(40):
        info = {"text": "x" * 100_000, "number": number}
        stored.write(tmp_path, "x", info, keep=True)
    done.set()
    reader.join()
    assert seen
    assert set(seen) == {100_000}
