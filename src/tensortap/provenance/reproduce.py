"""From a run folder to a folder in which the same program runs again.

::

    OUT/
      project/           a git worktree at the commit, with the patch applied
      requirements.txt   exact versions; what is on no index is a comment that says where it was
      environment.sh     the variables; secrets and those of the old session are comments
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
from tensortap.provenance.packages import normalised
from tensortap.provenance.recipe import Recipe, requirements

TIMEOUT = 600.0  # seconds; a checkout of a large repository takes its time
_FETCH = {"GIT_NO_LAZY_FETCH": "0"}  # a partial clone has to get what it checks out


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A folder in which a run can be started again, and what it lacks."""

    folder: Path
    script: Path
    missing: tuple[str, ...]  # what could not be restored
    notes: tuple[str, ...]  # what else to know

    def start(self) -> int:
        """Run it here, with this Python; its exit status."""
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
    """Make a folder in which a run can be started again.

    ``repo`` is a clone of the project (or an address to clone) if it is not where it was.
    ``version`` is the number of a ``git_info`` in the run; else the first, the state in which
    the program started::

        reproduce("experiments/20261115_181530", "again").start()
    """
    run = Path(run)
    runtime = _load(run, "runtime_info", version)
    packages = _load(run, "packages", version, required=False)
    git_info = _load(run, "git_info", version, required=False)
    target = Path(out) if out is not None else Path(f"{run.resolve().name}_reproduced")
    target = target.absolute()
    made = not target.exists()
    _make_empty(target)
    job = _Job(run, target, runtime, packages, git_info, version, say)
    try:
        return job.do(str(repo) if repo is not None else None)
    except Exception:
        if made:  # leave nothing half done
            shutil.rmtree(target, ignore_errors=True)
        raise


def _load(run: Path, stem: str, version: int | None, required: bool = True) -> dict[str, Any]:
    if not run.is_dir():
        raise NotFound(f"{run} is no folder")
    number = versions.first_version(run, stem)
    if version is not None and stem == "git_info":
        known = versions.numbers(run, stem)
        number = version if version in known else None
        if number is None and version != len(known) + 1:
            raise NotFound(f"no version {version} of git_info in {run}; 1 to {len(known) + 1}")
    found = versions.read_version(run, stem, number)
    if found is None:
        if not required:
            return {}
        raise NotFound(
            f"{run} is no run that can be reproduced: it has no readable {stem}.json; "
            "a run folder is one that tap.init() made"
        )
    return found


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise TensortapError(f"{folder} exists and is not empty; choose another with --out")
    except OSError as error:
        raise TensortapError(f"{folder} cannot be made: {error}") from error


class _Job:
    def __init__(
        self,
        run: Path,
        out: Path,
        runtime: dict[str, Any],
        packages: dict[str, Any],
        git_info: dict[str, Any],
        version: int | None,
        say: Callable[[str], None],
    ) -> None:
        self._run = run
        self._out = out
        self._runtime = runtime
        self._packages = packages
        self._git_info = git_info
        self._project: dict[str, Any] = git_info.get("project_git_info") or {}
        self._version = version
        self._say = say
        self.missing: list[str] = []
        self.notes: list[str] = []

    def do(self, repo: str | None) -> Reproduced:
        worktree = self._restore_project(repo)
        self._restore_packages()
        recipe = Recipe(self._runtime, self._project.get("repository") or "", worktree)
        (self._out / "environment.sh").write_text(recipe.environment(), "utf-8")
        script = self._out / "run.sh"
        script.write_text(recipe.script(self._run), "utf-8")
        script.chmod(0o755)
        self.missing += recipe.missing
        self.notes += recipe.notes
        self._about_python()
        self._about_modifications()
        self._write_readme()
        return Reproduced(self._out, script, tuple(self.missing), tuple(self.notes))

    # the code

    def _restore_project(self, repo: str | None) -> Path | None:
        status = self._project.get("status", "not recorded")
        worktree = self._out / "project"
        commit = self._project.get("commit_id") or ""
        known = versions.numbers(self._run, "git_info")
        if known and self._version is None:
            self.notes.append(
                f"the state of the code changed {len(known)} times during the run; this is the "
                f"first, at the start (--version {len(known) + 1} for the last)"
            )
        if not commit and not self._project.get("git_diff"):
            self.missing.append(f"the code: its git state was {status!r} when it ran")
            return None
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
        git = Git(source, timeout=TIMEOUT)
        try:
            git.run("worktree", "add", "--detach", str(worktree), commit, environ=_FETCH)
        except GitFailed as error:
            # a repository that may only be read: borrow its objects instead
            shutil.rmtree(worktree, ignore_errors=True)
            self.notes.append(f"a clone, because a worktree could not be made: {error}")
            self._clone(str(source), commit, worktree, "--shared")
        else:
            self.notes.append(f"remove it with: git -C {source} worktree remove --force {worktree}")

    def _find_repository(self, repo: str | None, commit: str) -> Path:
        places = [repo] if repo else [self._project.get("repository"), self._project.get("git_dir")]
        there = [Path(place) for place in places if place and os.path.isdir(place)]
        remote = self._project.get("remote") or ""
        if not there:
            gone = " and ".join(str(place) for place in places if place)
            from_where = f"; it was cloned from {remote}" if remote else ""
            raise NotFound(
                f"the repository is no longer at {gone}{from_where}; "
                "name a clone of it, or an address, with --repo"
            )
        for place in there:
            try:
                Git(place).run("cat-file", "-e", f"{commit}^{{commit}}")
            except GitFailed:
                continue
            return place
        fetch = f"git -C {there[0]} fetch {remote or 'origin'} {commit}"
        branch = self._project.get("branch") or ""
        hint = f" (it was on branch {branch})" if branch and branch != "(detached)" else ""
        raise NotFound(f"commit {commit} is not in {there[0]}{hint}; get it with: {fetch}")

    def _clone(self, source: str, commit: str, worktree: Path, *options: str) -> None:
        git = Git(self._out, timeout=TIMEOUT)
        try:
            git.run("clone", "--quiet", "--no-checkout", *options, "--", source, str(worktree))
        except GitFailed as error:
            raise NotFound(f"{source} cannot be cloned: {error}") from error
        clone = Git(worktree, timeout=TIMEOUT)
        try:
            clone.run("cat-file", "-e", f"{commit}^{{commit}}")
        except GitFailed:
            try:  # not on a branch: some servers hand it out all the same
                clone.run("fetch", "--quiet", "origin", commit)
            except GitFailed as error:
                raise NotFound(
                    f"commit {commit} is not in {source}, perhaps it was never pushed: {error}"
                ) from error
        clone.run("checkout", "--quiet", "--detach", commit, environ=_FETCH)

    def _restore_submodules(self, worktree: Path, repo: str | None) -> None:
        for path, info in (self._project.get("submodules") or {}).items():
            commit = info.get("commit_id") or ""
            places = [Path(repo) / path] if repo else []
            places += [Path(info[key]) for key in ("repository", "git_dir") if info.get(key)]
            for place in places:
                if not place.is_dir():
                    continue
                try:
                    Git(place, timeout=TIMEOUT).run(
                        "worktree", "add", "--detach", "--force", str(worktree / path), commit,
                        environ=_FETCH,
                    )  # fmt: skip
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
        told = info.get("git_diff") or ""
        if not told.startswith("See "):
            return
        name = os.path.basename(told[4:])
        patch = self._run / name
        wanted = info.get("patch_sha256")
        if not patch.is_file():
            self.missing.append(f"uncommitted changes: {name} is not in the run")
            return
        if wanted and hashlib.sha256(patch.read_bytes()).hexdigest() != wanted:
            self.missing.append(f"{name} is not the patch that git_info.json speaks of")
        self._say(f"applying {name}")
        try:
            Git(worktree, timeout=TIMEOUT).run(
                "-c", "apply.ignoreWhitespace=no", "-c", "core.autocrlf=false",
                "apply", "--whitespace=nowarn", str(patch.absolute()),
            )  # fmt: skip
        except GitFailed as error:
            self.missing.append(f"uncommitted changes: {name} does not apply: {error}")

    # the packages

    def _restore_packages(self) -> None:
        if not self._packages:
            self.missing.append("the packages: packages.json is not in the run")
            return
        checkouts = self._git_info.get("packages_git_info") or {}
        text, missing = requirements(self._packages, checkouts)
        (self._out / "requirements.txt").write_text(text, "utf-8")
        self.missing += missing
        for info in checkouts.values():
            told = info.get("git_diff") or ""
            if told.startswith("See ") and (self._run / told[4:]).is_file():
                shutil.copyfile(self._run / told[4:], self._out / told[4:])
        differ = self._differing()
        if differ:
            some = ", ".join(differ[:5]) + (", …" if len(differ) > 5 else "")
            self.notes.append(
                f"{len(differ)} packages are not as they were in this environment ({some}): "
                "pip install -r requirements.txt"
            )

    def _differing(self) -> list[str]:
        here = {
            normalised(str(dist.name)): dist.version
            for dist in importlib.metadata.distributions()
            if dist.name
        }
        then = self._packages.get("all_packages") or {}
        return [name for name, version in then.items() if here.get(normalised(name)) != version]

    def _about_python(self) -> None:
        then = str(self._packages.get("python_version") or "")
        if then and then != platform.python_version():
            self.missing.append(f"Python {then}: this is {platform.python_version()}")

    def _about_modifications(self) -> None:
        names = list(self._git_info.get("runtime_modifications") or {})
        if names:
            some = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            self.notes.append(f"the program had replaced {len(names)} functions itself: {some}")

    def _write_readme(self) -> None:
        lines = [f"Made by `tensortap reproduce {self._run}`. Start it with: sh run.sh", ""]
        if self.missing:
            lines += ["Could not be restored:", *(f"- {text}" for text in self.missing), ""]
        if self.notes:
            lines += ["To know:", *(f"- {text}" for text in self.notes), ""]
        (self._out / "README.txt").write_text("\n".join(lines), "utf-8")
