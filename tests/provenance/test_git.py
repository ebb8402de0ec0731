"""git_info.json and project.patch of real repositories of every kind."""

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from tensortap.rooms.provenance.git import collect_git, repository_info
from tensortap.rooms.provenance.redact import Redactor
from tests.provenance.conftest import SRC, Repo, tree

pytestmark = pytest.mark.slow

KEYS = {
    "commit_id", "branch", "status", "git_log", "log_entries_count", "git_diff", "remote",
    "repository", "git_dir",
}  # fmt: skip


@pytest.fixture
def look(tmp_path):
    """Collect the git info of a repository, and check that no file below .git has changed."""

    def look(repo, **options):
        before = repo.state()
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        info = collect_git(scratch, start=repo.path, redactor=Redactor(environ={}), **options)
        assert repo.state() == before
        json.dumps(info)
        patch = scratch / "project.patch"
        assert patch.exists() == bool(info["project_git_info"]["git_diff"])
        return SimpleNamespace(info=info, patch=patch if patch.exists() else None)

    return look


def apply(repo, found, where):
    """Check out the commit and apply the patch with plain git."""
    info = found.info["project_git_info"]
    fresh = Repo(where)
    if info["commit_id"]:
        fresh.git("fetch", "--quiet", str(repo.path), info["commit_id"])
        fresh.git("checkout", "--quiet", "--detach", info["commit_id"])
    fresh.git("apply", str(found.patch))
    return fresh


def test_clean_repository_has_no_patch(repo, look):
    found = look(repo)
    info = found.info["project_git_info"]
    assert info.keys() >= KEYS
    assert info["status"] == "clean"
    assert info["branch"] == "main"
    assert info["commit_id"] == repo.git("rev-parse", "HEAD")
    assert info["git_diff"] == ""
    assert info["repository"] == str(repo.path)
    assert found.patch is None
    assert found.info["packages_git_info"] == {}


def test_log(repo, look):
    commit = 'git commit --quiet --allow-empty --message "number $n «ü»"'
    subprocess.run(
        ["sh", "-c", f"for n in $(seq 60); do {commit}; done"], cwd=repo.path, check=True
    )
    info = look(repo).info["project_git_info"]
    assert info["log_entries_count"] == len(info["git_log"]) == 50
    first = info["git_log"][0]
    assert first.keys() == {"commit", "author", "date", "message"}
    assert first["message"] == "number 60 «ü»"
    assert first["author"] == "Ada"
    assert first["commit"] == info["commit_id"]
    assert first["date"][:2] == "20"


def test_patch_holds_every_kind_of_change(repo, look, tmp_path):
    repo.write("renamed before.txt", "a\nb\nc\n" * 20)
    repo.write("deleted.txt", "gone\n")
    repo.write("script.sh", "#!/bin/sh\n")
    repo.write("binary.bin", bytes(range(256)) * 10)
    repo.write("no newline.txt", "one\ntwo")
    repo.write("crlf.txt", "one\r\ntwo\r\n")
    repo.write("becomes a link", "text\n")
    repo.write(".gitignore", "ignored*\n")
    repo.commit()
    repo.write("model.py", "def forward(x):\n    return x * 3\n")
    repo.git("add", "model.py")
    repo.write("model.py", "def forward(x):\n    return x * 4  # staged, then changed again\n")
    repo.git("mv", "renamed before.txt", "renamed after.txt")
    (repo.path / "deleted.txt").unlink()
    (repo.path / "script.sh").chmod(0o755)
    repo.write("binary.bin", bytes(reversed(range(256))) * 11)
    repo.write("no newline.txt", "one\ntwo, and still none")
    repo.write("crlf.txt", "one\r\nthree\r\n")
    (repo.path / "becomes a link").unlink()
    (repo.path / "becomes a link").symlink_to("model.py")
    repo.write("untracked/ünï cödé «x».py", "print('hi')\n")
    repo.write("untracked/tab\tand\nnewline", "x\n")
    repo.write('untracked/"quoted" \\', "x")
    repo.write("untracked/:(top)pathspec*", "x")
    repo.write("untracked/binary", os.urandom(5000))
    repo.write("untracked/empty", "")
    repo.write("untracked/tool", "#!/bin/sh\n").chmod(0o755)
    (repo.path / "untracked/link").symlink_to("nowhere")
    repo.write("ignored.log", "not this\n")
    repo.git("add", "--intent-to-add", "untracked/empty")
    status = repo.git("status", "--porcelain")

    found = look(repo)
    info = found.info["project_git_info"]
    assert info["status"] == "dirty"
    assert info["git_diff"] == "See project.patch"
    assert info["untracked"]["left_out"] == []
    wanted = tree(repo.path)
    del wanted["ignored.log"]
    assert tree(apply(repo, found, tmp_path / "fresh").path) == wanted
    assert repo.git("status", "--porcelain") == status


def test_change_in_the_moment_of_the_commit(repo, look, tmp_path):
    """Same size, same time: git looks closer at files that are no older than its index."""
    for number in range(2):
        file = repo.write("data.bin", b"a" * 99)
        repo.commit()
        seen = file.stat()
        repo.write("data.bin", b"b" * 99)
        os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
        os.utime(repo.path / ".git/index", ns=(seen.st_atime_ns, seen.st_mtime_ns))
        repo.write(f"untracked{number}", "1\n")  # with an index of our own, and without
        fresh = apply(repo, look(repo), tmp_path / f"fresh{number}")
        assert (fresh.path / "data.bin").read_bytes() == b"b" * 99
        repo.write("data.bin", b"c" * (number + 1))


def test_configuration_of_the_user_has_no_effect(repo, look, tmp_path, plain_git):
    repo.write("a.txt", "".join(f"{n}\n" for n in range(50)))
    repo.write(".gitattributes", "*.txt diff=mine\n")
    repo.commit()
    ran = tmp_path / "ran"
    evil = f"touch {ran}; false"
    plain_git.write_text(
        plain_git.read_text()
        + f"""
        [diff]
            noprefix = true
            mnemonicPrefix = true
            external = "sh -c '{evil}'"
            context = 0
            renames = copies
            wordRegex = .
            colorMoved = zebra
            relative = true
            orderFile = {tmp_path / "nowhere"}
        [diff "mine"]
            textconv = "sh -c '{evil}'"
            command = "sh -c '{evil}'"
        [color]
            ui = always
        [core]
            fsmonitor = "sh -c '{evil}'"
            hooksPath = {tmp_path / "hooks"}
            pager = "sh -c '{evil}'"
            splitIndex = true
            untrackedCache = true
        [log]
            showSignature = true
        [format]
            pretty = fuller
        """
    )
    hook = tmp_path / "hooks" / "post-index-change"
    hook.parent.mkdir()
    hook.write_text(f"#!/bin/sh\n{evil}\n")
    hook.chmod(0o755)
    repo.write("a.txt", "".join(f"{n}\n" for n in range(50) if n != 25))
    repo.write("sub/new.txt", "new\n")
    found = look(repo)
    assert not ran.exists()
    plain_git.write_text("")
    assert tree(apply(repo, found, tmp_path / "fresh").path) == tree(repo.path)
    assert found.info["project_git_info"]["git_log"][-1]["message"] == "first"


def test_ignores_git_variables_of_a_hook(repo, look, tmp_path, monkeypatch):
    other = Repo(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(other.path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other.path))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other.path / "index"))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    monkeypatch.setenv("GIT_TRACE", "1")
    scratch = tmp_path / "s"
    scratch.mkdir()
    (repo.path / "new").write_text("x")
    found = collect_git(scratch, start=repo.path)["project_git_info"]
    assert found["repository"] == str(repo.path)
    assert found["status"] == "dirty"


def test_limit_for_untracked_files(repo, look, tmp_path):
    repo.write("small.py", "x = 1\n")
    repo.write("huge.ckpt", bytes(3000))
    found = look(repo, limit=1000)
    stated = found.info["project_git_info"]["untracked"]
    assert (stated["limit"], stated["included"], stated["left_out_count"]) == ("1000 B", 1, 1)
    assert (stated["left_out"][0]["path"], stated["left_out"][0]["size"]) == ("huge.ckpt", 3000)
    assert "limit" in stated["left_out"][0]["reason"]
    fresh = apply(repo, found, tmp_path / "fresh")
    assert (fresh.path / "small.py").exists()
    assert not (fresh.path / "huge.ckpt").exists()


def test_changes_that_are_too_large_are_not_stored(repo, look):
    repo.write("model.py", "x = 1\n" * 1_000_000)
    found = look(repo)
    info = found.info["project_git_info"]
    assert found.patch is None
    assert (info["status"], info["git_diff"]) == ("dirty", "")
    assert "the patch has 6.7 MiB, the limit is 4 MiB" in info["error"]


def test_leaves_out_credentials_and_runs(repo, look):
    repo.write(".env", "HF_TOKEN=hf_x\n")
    repo.write("experiments/1/run.json", "{}")
    repo.write("experiments/1/deep/layer.pt", "x")
    repo.write("mine/layer.pt", "x")
    found = look(repo, skip=(repo.path / "mine",))
    info = found.info["project_git_info"]
    assert [item["path"] for item in info["untracked"]["left_out"]] == [".env"]
    assert info["untracked"]["files_of_runs_left_out"] is True
    assert info["untracked"]["included"] == 0
    (repo.path / ".env").unlink()
    assert look(repo, skip=(repo.path / "mine",)).info["project_git_info"]["status"] == "clean"


def test_repository_without_commit(tmp_path, look):
    empty = Repo(tmp_path / 'a: "b" ü \\')
    info = look(empty).info["project_git_info"]
    assert (info["commit_id"], info["branch"], info["git_log"]) == ("", "main", [])
    assert info["status"] == "clean"
    empty.write("staged.py", "1\n")
    empty.git("add", "staged.py")
    empty.write("untracked.py", "2\n")
    found = look(empty)
    assert found.info["project_git_info"]["status"] == "dirty"
    assert tree(apply(empty, found, tmp_path / "fresh").path) == tree(empty.path)


def test_without_branch_repository_or_git(repo, look, tmp_path, monkeypatch):
    repo.git("checkout", "--quiet", "--detach")
    assert look(repo).info["project_git_info"]["branch"] == "(detached)"
    folder = tmp_path / "plain"
    folder.mkdir()
    info = repository_info(folder, tmp_path / "p")
    assert info.keys() >= KEYS
    assert info["status"] == "not a repository"
    assert str(folder) in info["error"]
    assert not (tmp_path / "p").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    info = repository_info(repo.path, tmp_path / "p")
    assert (info["status"], info["error"]) == ("unknown", "git is not installed")


def test_diff_that_hangs(repo, tmp_path, monkeypatch):
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True)
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    hang = 'case " $* " in *" diff "*) exec sleep 60;; esac'
    fake.write_text(f'#!/bin/sh\n{hang}\nexec {real.stdout.strip()} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    run = subprocess.run

    def patient(command, timeout=None, **options):
        # short only for what hangs: the others may take a second on a busy machine
        return run(command, timeout=timeout if "diff" in command else None, **options)

    monkeypatch.setattr(subprocess, "run", patient)
    info = repository_info(repo.path, tmp_path / "p", timeout=0.3)
    assert info["commit_id"] == repo.git("rev-parse", "HEAD")
    assert info["git_log"]
    assert info["status"] == "unknown"
    assert "longer than 0.3 s" in info["error"]
    assert not (tmp_path / "p").exists()


def test_worktree_of_a_bare_repository(repo, tmp_path):
    bare = tmp_path / "bare.git"
    repo.git("clone", "--quiet", "--bare", str(repo.path), str(bare))
    work = tmp_path / "work"
    subprocess.run(
        ["git", "-C", str(bare), "worktree", "add", "--quiet", "-b", "other", str(work)],
        check=True,
        capture_output=True,
    )
    (work / "new.py").write_text("1\n")
    info = repository_info(work, tmp_path / "p")
    assert (info["status"], info["branch"]) == ("dirty", "other")
    assert info["repository"] == str(work)
    assert info["git_dir"] == str(bare)


def test_leaves_out_special_files_and_nested_repositories(repo, look, tmp_path):
    os.mkfifo(repo.path / "pipe")
    Repo(repo.path / "nested").commit()
    repo.write("plain.py", "1\n")
    found = look(repo)
    left = {i["path"]: i["reason"] for i in found.info["project_git_info"]["untracked"]["left_out"]}
    assert left["nested/"] == "a repository of its own"
    assert set(tree(apply(repo, found, tmp_path / "fresh").path)) == {"model.py", "plain.py"}


def test_submodules_are_commits(repo, look, tmp_path, plain_git):
    plain_git.write_text(plain_git.read_text() + '[protocol "file"]\n allow = always\n')
    library = Repo(tmp_path / "library")
    library.commit()
    repo.git("submodule", "--quiet", "add", str(library.path), "third party/lib")
    repo.commit()
    inside = repo.path / "third party/lib"
    (inside / "lib.py").write_text("2\n")
    info = look(repo).info["project_git_info"]
    assert info["status"] == "clean"
    assert info["warnings"] == ["submodules are stored as commits, without changes in them"]
    subprocess.run(["git", "add", "."], cwd=inside, check=True)
    subprocess.run(["git", "commit", "-qam", "moved on"], cwd=inside, check=True)
    (repo.path / "model.py").write_text("changed\n")
    fresh = apply(repo, look(repo), tmp_path / "fresh")
    assert (fresh.path / "model.py").read_text() == "changed\n"


def test_remote_without_password(repo, look):
    repo.git("remote", "add", "upstream", "https://me:tok@example.org/r.git")
    assert look(repo).info["project_git_info"]["remote"] == "https://***@example.org/r.git"


def test_checkouts_of_editable_packages(repo, look, tmp_path):
    library = Repo(tmp_path / "library")
    library.write("lib.py", "1\n")
    library.commit()
    library.write("lib.py", "2\n")
    plain = tmp_path / "plain"
    plain.mkdir()
    packages = {
        "lib": {"version": "1", "editable": True, "source": str(library.path)},
        "own": {"version": "1", "editable": True, "source": str(repo.path)},
        "plain": {"version": "1", "editable": True, "source": str(plain)},
        "numpy": {"version": "1"},
    }
    found = look(repo, packages=packages)
    of = found.info["packages_git_info"]
    assert of.keys() == {"lib", "own"}
    assert of["lib"]["status"] == "dirty"
    assert of["lib"]["same_as"] == ""
    assert of["own"]["same_as"] == "project"


def test_project_is_the_folder_of_the_main_script(repo, tmp_path):
    code = """
        import json, pathlib, sys
        from tensortap.rooms.provenance.git import collect_git
        print(collect_git(pathlib.Path(sys.argv[1]))["project_git_info"]["repository"])
    """
    script = repo.write("x/main.py", textwrap.dedent(code))
    for command, folder in (
        [[str(script), str(tmp_path)], tmp_path],
        # without a main script the project is the working directory
        [["-c", textwrap.dedent(code), str(tmp_path)], script.parent],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env={**os.environ, "PYTHONPATH": str(SRC)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == str(repo.path)
