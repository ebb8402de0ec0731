"""Real repositories, and a git without the configuration of the machine."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
USER = "[user]\n name = Ada\n email = ada@example.org\n"


class Repo:
    """A git repository for a test."""

    def __init__(self, path, *init):
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet", "--initial-branch=main", *init)

    def git(self, *arguments, check=True):
        done = subprocess.run(
            ["git", *arguments], cwd=self.path, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def write(self, name, content):
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    def commit(self, message="a commit"):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")

    def state(self):
        """Return every file below .git: collecting must not change any."""
        top = self.path / ".git"
        return {
            str(file.relative_to(top)): (file.read_bytes(), file.stat().st_mtime_ns)
            for file in sorted(top.rglob("*"))
            if file.is_file()
        }


@pytest.fixture(autouse=True, scope="session")
def git_config(tmp_path_factory):
    """Hide the git configuration of whoever runs the tests."""
    config = tmp_path_factory.mktemp("git") / "config"
    config.write_text(USER)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("GIT_")]:
            patch.delenv(name)
        patch.setenv("GIT_CONFIG_GLOBAL", str(config))
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        yield config


@pytest.fixture(autouse=True)
def plain_git(git_config, monkeypatch):
    """The global git configuration, which a test may change."""
    git_config.write_text(USER)
    monkeypatch.delenv("TENSORTAP_MODIFICATIONS", raising=False)
    return git_config


@pytest.fixture
def repo(tmp_path):
    made = Repo(tmp_path / "repo")
    made.write("model.py", "def forward(x):\n    return x * 2\n")
    made.commit("first")
    return made


@pytest.fixture(scope="session")
def run_python():
    """Run code in a Python process of its own, from a file; returns what it prints."""

    def run(folder, code, *arguments, name="train.py", environ=None, check=True):
        script = Path(folder) / name
        if code is not None:
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(textwrap.dedent(code))
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(SRC), **(environ or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout if check else done

    return run


@pytest.fixture
def python(run_python, tmp_path):
    """Run code in a Python process of its own, by default in `tmp_path`."""
    return lambda code, *arguments, cwd=tmp_path, **options: run_python(
        cwd, code, *arguments, **options
    )


def tree(folder):
    """Return the files of a folder: name → (kind, content, executable)."""
    found = {}
    for file in sorted(Path(folder).rglob("*")):
        name = str(file.relative_to(folder))
        if ".git" in Path(name).parts or (file.is_dir() and not file.is_symlink()):
            continue
        if file.is_symlink():
            found[name] = ("link", os.readlink(file), False)
        else:
            found[name] = ("file", file.read_bytes(), bool(file.stat().st_mode & 0o100))
    return found
