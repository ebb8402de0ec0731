"""From a run folder to a folder in which the same program runs again.

::

    OUT/
      project/           a git worktree at the commit, with the patch applied
      requirements.txt   exact versions; packages that are on no index are comments
      environment.sh     the variables; secrets and those of the old shell are comments
      run.sh             cd and the command
      README.txt         what could not be restored
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensortap.errors import NotFound, TensortapError
from tensortap.limits import format_size
from tensortap.provenance import versions
from tensortap.provenance.gitcmd import Git, GitFailed
from tensortap.provenance.packages import normalized
from tensortap.provenance.recipe import Recipe, requirements

TIMEOUT = 600.0  # seconds; a checkout of a large repository takes long
_FETCH = {"GIT_NO_LAZY_FETCH": "0"}  # a partial clone has to fetch what it checks out


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A folder in which a run can be started again."""

    folder: Path
    script: Path
    missing: tuple[str, ...]  # what could not be restored
    notes: tuple[str, ...]

    def start(self) -> int:
        """Run the program with this Python, and return its exit status."""
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
        environ = {**os.environ, "PYTHON": sys.executable, "PATH": path}
        return subprocess.run(["sh", str(self.script)], env=environ, check=False).returncode


def reproduce(
    run: Path | str,
    out: Path | str | None = None,
    *,
    repo: Path | str | None = None,
    version: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Reproduced:
    """Create a folder in which a run can be started again.

    `repo` is a clone of the project, or a URL to clone, if it is no longer where it was.
    `version` is the number of a ``git_info`` in the run (default: the first, the state in which
    the program started). `say` is called with messages about the progress::

        reproduce("experiments/20261115_181530", "again").start()
    """
    run = Path(run)
    if not run.is_dir():
        raise NotFound(f"{run} is not a folder")
    target = Path(out or f"{run.resolve().name}_reproduced").absolute()
    job = _Job(run, target, version, say)
    created = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise TensortapError(f"{target} exists and is not empty: choose another with --out")
    except OSError as error:
        raise TensortapError(f"{target} cannot be created: {error}") from error
    try:
        return job.run(str(repo) if repo is not None else None)
    except Exception:
        if created:
            shutil.rmtree(target, ignore_errors=True)
        raise


def _load(run: Path, stem: str) -> dict[str, Any]:
    return versions.read_version(run, stem, versions.first_version(run, stem)) or {}


def _load_git_info(run: Path, version: int | None) -> dict[str, Any]:
    numbers = versions.numbers(run, "git_info")
    if version is None:
        return _load(run, "git_info")
    if version not in (*numbers, len(numbers) + 1):
        raise NotFound(f"no version {version} of git_info in {run}: it has 1 to {len(numbers) + 1}")
    return versions.read_version(run, "git_info", version if version in numbers else None) or {}


class _Job:
    def __init__(
        self, run: Path, out: Path, version: int | None, say: Callable[[str], None]
    ) -> None:
        self._run = run
        self._out = out
        self._version = version
        self._say = say
        self._runtime = _load(run, "runtime_info")
        if not self._runtime:
            raise NotFound(
                f"{run} cannot be reproduced: it has no readable runtime_info.json; "
                "tap.init() creates folders that can"
            )
        self._packages = _load(run, "packages")
        self._git_info = _load_git_info(run, version)
        self._project: dict[str, Any] = self._git_info.get("project_git_info") or {}
        self.missing: list[str] = []
        self.notes: list[str] = []

    def run(self, repo: str | None) -> Reproduced:
        worktree = self._restore_project(repo)
        self._restore_packages()
        recipe = Recipe(self._runtime, self._project.get("repository") or "", worktree)
        (self._out / "environment.sh").write_text(recipe.environment(), "utf-8")
        script = self._out / "run.sh"
        script.write_text(recipe.script(self._run), "utf-8")
        script.chmod(0o755)
        self.missing += recipe.missing
        self.notes += recipe.notes
        modified = list(self._git_info.get("runtime_modifications") or {})
        if modified:
            self.notes.append(f"the program replaced {len(modified)} functions: {_few(modified)}")
        self._write_readme()
        return Reproduced(self._out, script, tuple(self.missing), tuple(self.notes))

    # -- code --------------------------------------------------------------------------------

    def _restore_project(self, repo: str | None) -> Path | None:
        changes = len(versions.numbers(self._run, "git_info"))
        if changes and self._version is None:
            self.notes.append(
                f"the code changed {changes} times during the run; this is the first state, at "
                f"the start (--version {changes + 1} for the last)"
            )
        commit = self._project.get("commit_id") or ""
        if not commit and not self._project.get("git_diff"):
            status = self._project.get("status", "not recorded")
            self.missing.append(f"the code: its git status was {status!r} when it ran")
            return None
        worktree = self._out / "project"
        if commit:
            self._checkout(repo, commit, worktree)
        else:  # a repository before its first commit: the patch is everything
            worktree.mkdir()
            Git(worktree).run("init", "--quiet")
        self._restore_submodules(worktree, repo)
        self._apply(self._project, worktree)
        for item in (self._project.get("untracked") or {}).get("left_out", ()):
            size = format_size(item.get("size") or 0)
            self.missing.append(f"untracked {item.get('path')} ({size}): {item.get('reason')}")
        if self._project.get("error"):
            self.missing.append(f"changes to the code: {self._project['error']}")
        return worktree

    def _checkout(self, repo: str | None, commit: str, worktree: Path) -> None:
        self._say(f"checking out {commit[:12]} into {worktree}")
        if repo is not None and not os.path.isdir(repo):
            self._clone(repo, commit, worktree)
            return
        source = self._find_repository(repo, commit)
        try:
            _add_worktree(source, worktree, commit)
        except GitFailed as error:
            # the repository may be read-only: share its objects instead
            shutil.rmtree(worktree, ignore_errors=True)
            self.notes.append(f"project/ is a clone, because git could not add a worktree: {error}")
            self._clone(str(source), commit, worktree, "--shared")
        else:
            self.notes.append(f"remove it with: git -C {source} worktree remove --force {worktree}")

    def _find_repository(self, repo: str | None, commit: str) -> Path:
        places = [repo] if repo else [self._project.get("repository"), self._project.get("git_dir")]
        folders = [Path(place) for place in places if place and os.path.isdir(place)]
        remote = self._project.get("remote") or ""
        if not folders:
            old = " or ".join(str(place) for place in places if place)
            hint = f"; it was cloned from {remote}" if remote else ""
            raise NotFound(
                f"the repository is no longer at {old}{hint}; "
                "name a clone of it, or a URL, with --repo"
            )
        for folder in folders:
            if Git(folder).has_commit(commit):
                return folder
        branch = self._project.get("branch") or ""
        hint = f" (it was on branch {branch})" if branch and branch != "(detached)" else ""
        fetch = f"git -C {folders[0]} fetch {remote or 'origin'} {commit}"
        raise NotFound(f"commit {commit} is not in {folders[0]}{hint}; get it with: {fetch}")

    def _clone(self, source: str, commit: str, worktree: Path, *options: str) -> None:
        git = Git(self._out, timeout=TIMEOUT)
        try:
            git.run("clone", "--quiet", "--no-checkout", *options, "--", source, str(worktree))
        except GitFailed as error:
            raise NotFound(f"{source} cannot be cloned: {error}") from error
        clone = Git(worktree, timeout=TIMEOUT)
        if not clone.has_commit(commit):
            try:  # some servers hand out commits that are on no branch
                clone.run("fetch", "--quiet", "origin", commit)
            except GitFailed as error:
                raise NotFound(
                    f"commit {commit} is not in {source}, perhaps it was never pushed: {error}"
                ) from error
        clone.run("checkout", "--quiet", "--detach", commit, environ=_FETCH)

    def _restore_submodules(self, worktree: Path, repo: str | None) -> None:
        for path, info in (self._project.get("submodules") or {}).items():
            commit = info.get("commit_id") or ""
            folders = [Path(repo) / path] if repo else []
            folders += [Path(info[key]) for key in ("repository", "git_dir") if info.get(key)]
            for folder in filter(Path.is_dir, folders):
                try:
                    _add_worktree(folder, worktree / path, commit)
                except GitFailed:
                    continue
                self._apply(info, worktree / path)
                break
            else:
                self.missing.append(
                    f"submodule {path} at {commit}: "
                    f"git -C {worktree} submodule update --init {path}"
                )

    def _apply(self, info: dict[str, Any], worktree: Path) -> None:
        patch = self._patch_of(info)
        if patch is None:
            return
        if not patch.is_file():
            self.missing.append(f"uncommitted changes: {patch.name} is not in the run")
            return
        expected = info.get("patch_sha256")
        if expected and hashlib.sha256(patch.read_bytes()).hexdigest() != expected:
            self.missing.append(f"{patch.name} is not the patch that git_info.json refers to")
        self._say(f"applying {patch.name}")
        try:
            Git(worktree, timeout=TIMEOUT).run(
                "-c", "apply.ignoreWhitespace=no", "-c", "core.autocrlf=false",
                "apply", "--whitespace=nowarn", str(patch.absolute()),
            )  # fmt: skip
        except GitFailed as error:
            self.missing.append(f"uncommitted changes: {patch.name} does not apply: {error}")

    def _patch_of(self, info: dict[str, Any]) -> Path | None:
        diff = info.get("git_diff") or ""
        return self._run / os.path.basename(diff[4:]) if diff.startswith("See ") else None

    # -- packages ----------------------------------------------------------------------------

    def _restore_packages(self) -> None:
        if not self._packages:
            self.missing.append("the packages: packages.json is not in the run")
            return
        checkouts = self._git_info.get("packages_git_info") or {}
        text, missing = requirements(self._packages, checkouts)
        (self._out / "requirements.txt").write_text(text, "utf-8")
        self.missing += missing
        for patch in map(self._patch_of, checkouts.values()):
            if patch is not None and patch.is_file():
                shutil.copyfile(patch, self._out / patch.name)
        here = {
            normalized(str(dist.name)): dist.version
            for dist in importlib.metadata.distributions()
            if dist.name
        }
        then = self._packages.get("all_packages") or {}
        differ = [name for name, version in then.items() if here.get(normalized(name)) != version]
        if differ:
            self.notes.append(
                f"{len(differ)} packages differ from this environment ({_few(differ)}): "
                "pip install -r requirements.txt"
            )
        python = str(self._packages.get("python_version") or "")
        if python and python != platform.python_version():
            self.missing.append(f"Python {python}: this is {platform.python_version()}")

    def _write_readme(self) -> None:
        lines = [f"Created by `tensortap reproduce {self._run}`. Start it with: sh run.sh", ""]
        if self.missing:
            lines += ["Could not be restored:", *(f"- {text}" for text in self.missing), ""]
        if self.notes:
            lines += ["Notes:", *(f"- {text}" for text in self.notes), ""]
        (self._out / "README.txt").write_text("\n".join(lines), "utf-8")


def _add_worktree(repository: Path, worktree: Path, commit: str) -> None:
    Git(repository, timeout=TIMEOUT).run(
        "worktree", "add", "--detach", "--force", str(worktree), commit, environ=_FETCH
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
