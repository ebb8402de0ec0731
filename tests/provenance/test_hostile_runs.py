"""A run folder from a stranger: `reproduce` executes nothing and writes only to its target."""

import contextlib
import json
import os
import subprocess

import pytest
from packaging.requirements import Requirement

from tensortap.core.errors import NotFound, TensortapError
from tensortap.rooms.provenance import reproduce
from tests.provenance.conftest import Repo, tree

pytestmark = pytest.mark.slow


@pytest.fixture
def ran(tmp_path):
    """The file that every attack creates when its code is executed."""
    return tmp_path / "ran"


@pytest.fixture
def evil(tmp_path, ran):
    """A program that leaves a trace and passes its input on."""
    script = tmp_path / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {ran}\nexec cat\n")
    script.chmod(0o755)
    return script


@pytest.fixture
def victim(tmp_path, monkeypatch):
    """A home folder that must stay as it is."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("precious\n")
    monkeypatch.setenv("HOME", str(home))
    yield home
    assert tree(home) == {".bashrc": ("file", b"precious\n", False)}


def make_run(folder, *, runtime=None, packages=None, project=None, **git):
    """Write the provenance files of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    command = {"executable": "/v/bin/python", "full_command": "/v/bin/python x.py"}
    files = {
        "runtime_info": {"command": command, "working_directory": "/", **(runtime or {})},
        "packages": {"python_version": "3.12.1", "all_packages": {}, **(packages or {})},
        "git_info": {"project_git_info": project or {}, **git},
    }
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def trap(folder, evil):
    """Create a repository whose configuration runs a program wherever git allows it."""
    repo = Repo(folder)
    repo.write(".gitattributes", "*.txt filter=evil diff=evil\n")
    repo.write("a.txt", "content\n")
    commit = repo.commit()
    hook = repo.path / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_bytes(evil.read_bytes())
    hook.chmod(0o755)
    (hook.parent / "reference-transaction").write_bytes(evil.read_bytes())
    (hook.parent / "reference-transaction").chmod(0o755)
    settings = {
        "filter.evil.smudge": evil, "filter.evil.clean": evil, "filter.evil.required": "true",
        "filter.evil.process": evil, "diff.evil.textconv": evil, "core.fsmonitor": evil,
        "core.hooksPath": hook.parent, "uploadpack.packObjectsHook": evil, "core.pager": evil,
        "core.sshCommand": evil, "core.alternateRefsCommand": evil, "gpg.program": evil,
        "remote.origin.url": "ext::" + str(evil), "remote.origin.uploadpack": evil,
        "remote.origin.promisor": "true", "extensions.partialClone": "origin",
    }  # fmt: skip
    with (repo.path / ".git/config").open("a") as config:
        for name, value in settings.items():
            section, _, key = name.rpartition(".")
            head, _, rest = section.partition(".")
            config.write(f'[{head} "{rest}"]\n' if rest else f"[{head}]\n")
            config.write(f'{key} = "{value}"\n')
    return commit


@pytest.mark.attack("run with a hostile repository")
def test_ignores_a_repository_inside_the_run(tmp_path, evil, ran):
    run = tmp_path / "run"
    commit = trap(run / "repo", evil)
    make_run(run, project={"commit_id": commit, "repository": str(run / "repo")})
    with pytest.raises(NotFound, match="name a clone of it"):
        reproduce(run, tmp_path / "out")
    assert not ran.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.attack("run with a hostile repository")
def test_runs_no_filter_and_no_hook_of_a_repository(tmp_path, evil, ran):
    repo = tmp_path / "beside"
    commit = trap(repo, evil)
    run = make_run(tmp_path / "run", project={"commit_id": commit, "repository": str(repo)})
    made = reproduce(run, tmp_path / "out")
    assert (made.folder / "project/a.txt").read_text() == "content\n"
    assert any("filters did not run" in note for note in made.notes)
    assert not ran.exists()


@pytest.mark.attack("run with a hostile repository")
def test_runs_no_filter_of_the_user(tmp_path, evil, ran, plain_git):
    """The attributes of a stranger's repository choose when a filter of the user runs."""
    plain_git.write_text(f'{plain_git.read_text()}\n[filter "evil"]\nsmudge = {evil}\n')
    repo = Repo(tmp_path / "repo")
    repo.write(".gitattributes", "* filter=evil\n")
    project = {"commit_id": repo.commit(), "repository": str(repo.path)}
    run = make_run(tmp_path / "run", project={**project, "git_diff": "See project.patch"})
    (run / "project.patch").write_text(
        "diff --git a/b b/b\nnew file mode 100644\n--- /dev/null\n+++ b/b\n@@ -0,0 +1 @@\n+x\n"
    )
    made = reproduce(run, tmp_path / "out")
    assert (made.folder / "project/b").read_text() == "x\n"
    assert not ran.exists()


@pytest.mark.attack("path outside a folder")
@pytest.mark.parametrize(
    "reference",
    ["See ../.bashrc", "See /etc/passwd", "See run.sh", "See project.patch\n"],
)
def test_rejects_patches_with_other_names(tmp_path, victim, repo, reference):
    project = {"commit_id": repo.commit(), "repository": str(repo.path)}
    for where in (
        {"packages_git_info": {"x": {"git_diff": reference}}},
        {"project": {**project, "git_diff": reference}},
    ):
        run = make_run(tmp_path / "run", **{"project": project, **where})
        (run / ".bashrc").write_text("evil\n")
        with pytest.raises(TensortapError, match=r"git_info.json of .* is not valid"):
            reproduce(run, tmp_path / "home" / "out")


@pytest.mark.attack("options and lines in a run")
@pytest.mark.parametrize(
    "commit",
    ["--upload-pack=touch ../../ran", "HEAD", "A" * 40, "a" * 40 + "\n"],
)
def test_rejects_commits_that_are_no_digest(tmp_path, repo, ran, commit):
    project = {"commit_id": repo.commit(), "repository": str(repo.path)}
    run = make_run(tmp_path / "run", project={**project, "commit_id": commit})
    with pytest.raises(TensortapError, match=r"git_info.json of .* is not valid"):
        reproduce(run, tmp_path / "out")
    assert not ran.exists()


@pytest.mark.attack("path outside a folder")
@pytest.mark.parametrize(
    "paths",
    [["../../home/new"], ["/home/new"], ["{home}/new"], ["link", "link/new"], [".git/config"]],
)
def test_patches_stay_in_the_project(tmp_path, victim, repo, paths):
    text = ""
    for path in paths:
        path = path.format(home=victim)
        mode, content = ("120000", str(victim)) if path == "link" else ("100644", "evil")
        text += (
            f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n"
            f"@@ -0,0 +1 @@\n+{content}\n\\ No newline at end of file\n"
        )
    project = {"commit_id": repo.commit(), "repository": str(repo.path),
               "git_diff": "See project.patch"}  # fmt: skip
    run = make_run(tmp_path / "run", project=project)
    (run / "project.patch").write_text(text)
    made = reproduce(run, tmp_path / "out")
    assert any("does not apply" in text for text in made.missing)
    assert "evil" not in (made.folder / "project/.git/config").read_text()


@pytest.mark.attack("path outside a folder")
def test_working_directory_stays_in_the_project(tmp_path, victim):
    repo = Repo(tmp_path / "repo")
    (repo.path / "link").symlink_to(victim)
    project = {"commit_id": repo.commit(), "repository": str(repo.path)}
    for folder in ("link/new", "../home/new"):
        runtime = {"working_directory": f"{repo.path}/{folder}"}
        run = make_run(tmp_path / "run", runtime=runtime, project=project)
        with pytest.raises(TensortapError, match="leads out of"):
            reproduce(run, tmp_path / "out")


@pytest.mark.attack("path outside a folder")
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_opens_only_regular_files(tmp_path, repo, kind):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    project = {"commit_id": repo.commit(), "repository": str(repo.path),
               "git_diff": "See project.patch"}  # fmt: skip
    run = make_run(tmp_path / "run", project=project)

    def put(name):
        path = run / name
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(secret if kind == "link" else "/dev/zero")

    put("project.patch")
    made = reproduce(run, tmp_path / "out")
    assert sum("patch" in text for text in made.missing) == 1
    put("runtime_info.json")
    with pytest.raises(NotFound, match="no readable runtime_info"):
        reproduce(run, tmp_path / "out2")


@pytest.mark.attack("options and lines in a run")
def test_lines_stay_lines(tmp_path, ran):
    """A newline in a name, a value or a version does not start a line of a script."""
    bad = f"x\ntouch {ran}\n#"
    runtime = {
        "command": {
            "executable": bad,
            "full_command": f"'{bad}' 'a\ntouch {ran}' '--x{bad}' '***' '--y{bad}=***' '$({bad})'",
        },
        "environment_variables": {
            bad: "1", "A": bad, "B": f"$(touch {ran})`touch {ran}`'\ntouch {ran}\n", "HOME": bad,
            "RANK": bad, "TOKEN": f"***{bad}", "É": "1", "PATH": f"'; touch {ran}; '",
            "C\rD": "1", "E": "a\rb",
        },
        "working_directory": bad,
    }  # fmt: skip
    packages = {
        "python_version": bad,
        "all_packages": {
            f"a\n-r {ran}": "1", "b": f"1\n--index-url={ran}", "c": "1 ; evil", "d": "1+cpu\n-r x",
            "--extra-index-url": "x", "e": "1", "f": "1", "g": "1+cu१२", "ok": "1.2.3",
        },
        "packages": {
            "e": {"url": f"https://x/\n-r {ran}", "commit_id": "abc"},
            "f": {"url": "file:///x", "source": f"/x\n-r {ran}"},
        },
    }  # fmt: skip
    made = reproduce(
        make_run(tmp_path / "run", runtime=runtime, packages=packages), tmp_path / "out"
    )
    for script in ("environment.sh", "run.sh"):
        subprocess.run(["sh", str(made.folder / script)], cwd=tmp_path, capture_output=True,
                       check=False, timeout=60, env={"PYTHON": "true"})  # fmt: skip
    assert not ran.exists()
    lines = (made.folder / "requirements.txt").read_text().splitlines()
    used = [line for line in lines if line and not line.startswith("#")]
    assert used == ["g==1+cu१२", "ok==1.2.3"] or used == ["ok==1.2.3"]
    assert [Requirement(line).name for line in used][-1] == "ok"
    shown = [*made.missing, *made.notes, *(made.folder / "README.txt").read_text().split("\n")]
    assert all(text.isprintable() for text in shown)


DAMAGED = [
    b"[]", b"null", b'{"command": []}', b'{"environment_variables": {"A": 1}}', b"\xff\xfe{}",
    b"[" * 100_000, b'{"command": {"full_command": "\\"unbalanced"}}',
    b'{"command": {"full_command": "a\\u0000b"}}', b'{"command": {"full_command": "\\ud800"}}',
]  # fmt: skip


@pytest.mark.attack("damaged provenance of a run")
def test_damaged_files_give_one_clear_error(tmp_path):
    for number, content in enumerate(DAMAGED):
        for stem in ("runtime_info", "packages", "git_info"):
            run = make_run(tmp_path / f"{stem}-{number}")
            (run / f"{stem}.json").write_bytes(content)
            (run / f"{stem}.².json").write_bytes(b"{}")  # a digit, but no number
            with contextlib.suppress(TensortapError):
                reproduce(run, tmp_path / f"out-{stem}-{number}")


@pytest.mark.attack("options and lines in a run")
def test_addresses_of_other_programs_are_rejected(tmp_path, repo, ran):
    run = make_run(tmp_path / "run", project={"commit_id": repo.commit(), "repository": "/nowhere",
                                              "remote": f"ext::touch {ran}"})  # fmt: skip
    for address in (f"ext::touch {ran}", f"--upload-pack=touch {ran}", "fd::17", "nothing"):
        with pytest.raises(NotFound, match="neither a folder nor an address"):
            reproduce(run, tmp_path / "out", repo=address)
    assert not ran.exists()


@pytest.mark.attack("reading the run of somebody else")
def test_only_the_user_reads_what_secrets_are_filled_into(tmp_path):
    run = make_run(tmp_path / "run", runtime={"environment_variables": {"HF_TOKEN": "***"}})
    before = os.umask(0o022)
    try:
        made = reproduce(run, tmp_path / "out")
    finally:
        os.umask(before)
    assert made.folder.stat().st_mode & 0o777 == 0o700
    assert (made.folder / "environment.sh").stat().st_mode & 0o777 == 0o600
