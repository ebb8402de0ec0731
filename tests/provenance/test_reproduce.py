"""`reproduce` turns a run folder back into a program that does the same."""

import json
import os
import shutil
import subprocess
import sys

import msgspec
import pytest
from packaging.requirements import Requirement

from tensortap.core.errors import NotFound, TensortapError
from tensortap.rooms.provenance import collect, reproduce
from tensortap.rooms.provenance.reproduction import Recipe, requirements
from tensortap.rooms.provenance.stored import StoredPackages, StoredRepository, StoredRuntime
from tests.provenance.conftest import SRC, Repo, tree

pytestmark = pytest.mark.slow

SCRIPT = """\
import json, os, pathlib, sys
import helper, untracked.extra
from tensortap.rooms.provenance import collect

run = pathlib.Path("experiments/run")
run.mkdir(parents=True)
collect(run, modifications=False)
found = {
    "argv": sys.argv[1:], "helper": helper.value, "extra": untracked.extra.value,
    "variable": os.environ.get("MY_SETTING"), "config": pathlib.Path(sys.argv[2]).read_text(),
}
(run / "result.json").write_text(json.dumps(found))
print(json.dumps(found))
"""


def make_project(path):
    """Create a project with a commit, a change to it and an untracked module."""
    repo = Repo(path)
    repo.write("src/train.py", SCRIPT)
    repo.write("src/helper.py", "value = 'committed'\n")
    repo.write("src/data.bin", bytes(range(256)))
    repo.write("conf/base.txt", "config")
    repo.commit("train")
    repo.write("src/helper.py", "value = 'changed'\n")
    repo.write("src/untracked/__init__.py", "")
    repo.write("src/untracked/extra.py", "value = 'untracked'\n")
    repo.write("src/data.bin", bytes(reversed(range(256))))
    return repo


@pytest.fixture
def project(tmp_path):
    return make_project(tmp_path / "repo")


@pytest.fixture(scope="module")
def recorded_once(tmp_path_factory):
    project = make_project(tmp_path_factory.mktemp("recorded") / "repo")
    return project, start(project, "x", "../conf/base.txt")[0]


@pytest.fixture
def recorded(recorded_once, tmp_path):
    """A project that stays as it is, and a copy of a run of it."""
    project, run = recorded_once
    shutil.copytree(run, tmp_path / "run")
    return project, tmp_path / "run"


def start(project, *arguments, **environ):
    done = subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=project.path / "src",
        env={**os.environ, "PYTHONPATH": str(SRC), "MY_SETTING": "a 'b' $c", **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return project.path / "src/experiments/run", done.stdout


def start_script(made, **environ):
    """Start run.sh with this Python; return the finished process."""
    environ = {**os.environ, "PYTHON": sys.executable, **environ}
    return subprocess.run(
        ["sh", str(made.script)], capture_output=True, text=True, check=False, env=environ
    )


def test_end_to_end(project, tmp_path):
    config = str(project.path / "conf/base.txt")
    run, printed = start(project, "--lr=0.1 *", config)
    wanted = {k: v for k, v in tree(project.path).items() if "experiments" not in k}
    result = json.loads((run / "result.json").read_text())
    # the world moves on
    project.write("src/helper.py", "value = 'something else'\n")
    shutil.rmtree(project.path / "src/untracked")
    project.write("conf/base.txt", "other config")
    project.commit("later")

    made = reproduce(run, tmp_path / "again")
    worktree = made.folder / "project"
    got = {k: v for k, v in tree(worktree).items() if "__pycache__" not in k}
    assert got == {k: v for k, v in wanted.items() if "__pycache__" not in k}
    assert start_script(made).returncode == 0
    again = json.loads((worktree / "src/experiments/run/result.json").read_text())
    assert again["argv"] == [result["argv"][0], str(worktree / "conf/base.txt")]
    assert {**again, "argv": 0} == {**result, "argv": 0}
    assert result["helper"] == "changed"
    assert result["extra"] == "untracked"
    assert json.loads(printed) == result
    assert project.git("status", "--porcelain").splitlines() in ([], ["?? src/experiments/"])


def test_lists_what_it_could_not_restore(project, tmp_path):
    run, _ = start(project, "--token=abc", str(project.path / "conf/base.txt"), HF_TOKEN="x y z")
    info = json.loads((run / "packages.json").read_text())
    info["python_version"] = "2.7.18"
    info["all_packages"]["of-nowhere"] = "1.0+mine"
    info["packages"]["local"] = {"version": "1", "editable": True, "url": "file:///gone",
                                 "source": "/gone"}  # fmt: skip
    info["all_packages"]["local"] = "1"
    (run / "packages.json").write_text(json.dumps(info))
    made = reproduce(run, tmp_path / "again")
    told = "\n".join(made.missing)
    assert "HF_TOKEN" in told
    assert "secrets of the command: replace *** in run.sh" in made.missing
    assert "Python 2.7.18" in told
    assert "of-nowhere 1.0+mine" in told
    assert "local 1: editable from /gone" in told
    assert "HF_TOKEN" in (made.folder / "README.txt").read_text()
    environment = (made.folder / "environment.sh").read_text()
    assert "# export HF_TOKEN=  # a secret: fill in" in environment
    # it stops and says so, rather than running with ***
    done = start_script(made)
    assert done.returncode == 1
    assert "replace *** in run.sh" in done.stderr
    lines = made.script.read_text().replace("***", "it is back").splitlines()
    made.script.write_text("\n".join(line for line in lines if "delete this" not in line))
    done = start_script(made)
    assert json.loads(done.stdout)["argv"][0] == "--token=it is back"


def test_requirements():
    packages = {
        "python_version": "3.12.1",
        "all_packages": {
            "numpy": "2.1.0", "pip": "24.0", "torch": "2.5.0+cu124", "torchvision": "0.20+cu124",
            "vcs": "1", "hidden": "1", "mine": "0.1", "lib": "0.2",
        },
        "packages": {
            "vcs": {"url": "https://example.org/x.git", "vcs": "git", "commit_id": "abc"},
            "hidden": {"url": "https://***@example.org/x.git", "vcs": "git", "commit_id": "abc"},
            "mine": {"url": "file:///work", "editable": True, "source": "/work"},
            "lib": {"url": "file:///lib", "editable": True, "source": "/lib"},
        },
    }  # fmt: skip
    checkouts = {
        "mine": {"commit_id": "c0ffee" * 6 + "c0ff", "status": "dirty", "same_as": "project"},
        "lib": {"commit_id": "beef" * 10, "status": "clean"},
    }
    text, missing = requirements(
        msgspec.convert(packages, StoredPackages),
        msgspec.convert(checkouts, dict[str, StoredRepository]),
    )
    assert text.splitlines() == [
        "# Python 3.12.1",
        "--extra-index-url https://download.pytorch.org/whl/cu124",
        "numpy==2.1.0",
        "# pip==24.0",
        "torch==2.5.0+cu124",
        "torchvision==0.20+cu124",
        "vcs @ git+https://example.org/x.git@abc",
        "# hidden==1: installed from https://***@example.org/x.git",
        f"# mine==0.1: editable from /work, commit {'c0ffee' * 6}c0ff (dirty), part of project/",
        f"# lib==0.2: editable from /lib, commit {'beef' * 10} (clean)",
    ]
    assert [line.split()[0] for line in missing] == ["hidden", "lib"]


def test_requirements_of_this_environment_are_valid(recorded, tmp_path):
    made = reproduce(recorded[1], tmp_path / "again")
    lines = (made.folder / "requirements.txt").read_text().splitlines()
    names = {Requirement(line).name for line in lines if line[0] not in "#-"}
    assert "numpy" in names


def recipe(command, old="", new=None, cwd="/", environ=None, **rest):
    runtime = {
        "command": {"executable": "/v/bin/python", "full_command": command, **rest},
        "environment_variables": environ or {},
        "working_directory": cwd,
    }
    return Recipe(msgspec.convert(runtime, StoredRuntime), old, new)


def test_environment_sh(tmp_path):
    (tmp_path / "src").mkdir()
    variables = {
        "PYTHONPATH": "/repo/src:/repo/.venv/lib:/other", "HOME": "/home/me", "ODD": "a\nb'c",
        "BASH_FUNC_x%%": "() { :; }", "URL": "https://***@host/", "CUDA_VISIBLE_DEVICES": "0",
        "RANK": "0", "WORLD_SIZE": "4", "MULTI": "x\ny ***",
    }  # fmt: skip
    made = recipe("/v/bin/python x.py", old="/repo", new=tmp_path, environ=variables)
    script = tmp_path / "environment.sh"
    script.write_text(made.environment())
    out = subprocess.run(
        ["env", "-i", "sh", "-c", f". {script}; /usr/bin/env -0"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    got = dict(line.split("=", 1) for line in out.split("\0") if line)
    assert got["PYTHONPATH"] == f"{tmp_path}/src:/repo/.venv/lib:/other"
    assert got["ODD"] == "a\nb'c"
    assert got["CUDA_VISIBLE_DEVICES"] == "0"
    assert not {"HOME", "URL", "RANK", "MULTI"} & got.keys()
    assert any("one of 4 processes" in text for text in made.missing)


def test_command(tmp_path):
    assert recipe("/v/bin/python -u x.py 'a b'").command == "\"${PYTHON:-python3}\" -u x.py 'a b'"
    launched = recipe(
        "/v/bin/python -u x.py", launcher="/v/bin/python /v/bin/torchrun --nproc-per-node=2 x.py"
    )
    assert launched.command == (
        '"${PYTHON:-python3}" "$(command -v torchrun)" --nproc-per-node=2 x.py'
    )
    assert "interactive" in recipe("/v/bin/python").missing[0]
    assert "notebook" in recipe("/v/bin/python -m ipykernel_launcher -f x").missing[0]
    assert "not recorded" in recipe("").missing[0]
    assert "/not/there" in recipe("/v/bin/python x.py", cwd="/not/there").missing[0]


def test_rejects_folder_that_is_not_a_run(tmp_path):
    with pytest.raises(NotFound, match="is not a folder"):
        reproduce(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="no readable runtime_info"):
        reproduce(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "empty/runtime_info.json").write_text("{half")
    with pytest.raises(NotFound, match="no readable runtime_info"):
        reproduce(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rejects_target_that_is_not_empty(recorded, tmp_path):
    _, run = recorded
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("precious")
    with pytest.raises(TensortapError, match="not empty"):
        reproduce(run, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["mine"]


@pytest.fixture
def moved(recorded, tmp_path):
    """A run, and a copy of its repository, which is no longer where it was."""
    project, run = recorded
    info = json.loads((run / "git_info.json").read_text())
    changes = {
        "repository": str(tmp_path / "gone"),
        "git_dir": str(tmp_path / "gone/.git"),
        "remote": "https://***@example.org/r.git",
    }
    info["project_git_info"] |= changes
    (run / "git_info.json").write_text(json.dumps(info))
    shutil.copytree(project.path, tmp_path / "moved", symlinks=True)
    return run, tmp_path / "moved"


def test_finds_repository_that_has_moved(moved, tmp_path):
    run, other = moved
    with pytest.raises(NotFound, match=r"no longer at .*cloned from https://\*\*\*@.*--repo"):
        reproduce(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for name, repo in (("folder", other), ("url", f"file://{other}")):
        made = reproduce(run, tmp_path / name, repo=repo)
        assert (made.folder / "project/src/helper.py").read_text() == "value = 'changed'\n"
        assert (made.folder / "project/src/untracked/extra.py").exists()


def test_reports_missing_commit(moved, tmp_path):
    run, _ = moved
    other = Repo(tmp_path / "unrelated")
    other.commit()
    commit = json.loads((run / "git_info.json").read_text())["project_git_info"]["commit_id"]
    with pytest.raises(NotFound, match=rf"{commit} cannot be fetched from .*branch main"):
        reproduce(run, tmp_path / "out", repo=other.path)
    assert not (tmp_path / "out").exists()


def test_without_repository_and_without_commit(python, tmp_path):
    code = "from tensortap.rooms import provenance; provenance.collect('run', modifications=False)"
    young = Repo(tmp_path / "young").path
    for folder in (tmp_path / "plain", young):
        (folder / "run").mkdir(parents=True)
        python(code, cwd=folder)
    made = reproduce(tmp_path / "plain/run", tmp_path / "out")
    assert any("the code" in text for text in made.missing)
    assert start_script(made).returncode == 0
    made = reproduce(young / "run", tmp_path / "out2")
    assert (made.folder / "project/train.py").read_text() == code


def test_reports_patch_that_was_changed(recorded, tmp_path):
    _, run = recorded
    (run / "project.patch").write_text("nonsense\n")
    made = reproduce(run, tmp_path / "out")
    told = "\n".join(made.missing)
    assert "is not the patch that git_info.json refers to" in told
    assert "does not apply" in told
    (run / "project.patch").unlink()
    made = reproduce(run, tmp_path / "out2")
    assert any("project.patch is not in the run" in text for text in made.missing)


def test_restores_first_state_of_the_code(project, tmp_path):
    run, _ = start(project, "x", "../conf/base.txt")
    project.write("src/helper.py", "value = 'edited while it ran'\n")
    collect(run, start=project.path, modifications=False)
    made = reproduce(run, tmp_path / "first")
    helper = "project/src/helper.py"
    assert (made.folder / helper).read_text() == "value = 'changed'\n"
    assert any("changed 1 times" in note for note in made.notes)
