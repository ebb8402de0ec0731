"""From a run folder to a folder in which the same program runs again.

::

    OUT/
      project/           a repository at the commit, with the patch applied
      requirements.txt   exact versions; packages that are on no index are comments
      environment.sh     the variables; secrets and those of the old shell are comments
      run.sh             cd and the command
      README.txt         what could not be restored

A run may come from a stranger, so that nothing in it is trusted. Commits are fetched into a new
repository with a configuration of its own: filters, hooks and settings of the repository that the
run names have no effect, and git runs there only to send objects. Nothing is written outside of
OUT, and nothing of the run is executed: the user reads run.sh and starts it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.files import CorruptFile, folder_mode, read_small, restrict
from tensortap.core.limits import format_size
from tensortap.rooms.provenance.gitcmd import Git, GitFailed
from tensortap.rooms.provenance.patch import MAX_PATCH
from tensortap.rooms.provenance.recipe import Recipe, requirements
from tensortap.rooms.provenance.stored import (
    StoredGit,
    StoredPackages,
    StoredRuntime,
    load,
    numbers,
    printable,
)

TIMEOUT = 600.0  # seconds; a checkout of a large repository takes long
_ADDRESS = re.compile(r"(https?|ssh|git|file)://.+|[\w.-]+@[\w.-]+:.+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A folder in which a run can be started again."""

    folder: Path
    script: Path
    missing: tuple[str, ...]  # what could not be restored
    notes: tuple[str, ...]


def reproduce(
    run: Path | str,
    out: Path | str | None = None,
    *,
    repo: Path | str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Reproduced:
    """Create a folder in which a run can be started again.

    `repo` is a clone of the project, or a URL to clone, if it is no longer where it was.
    If the code changed during the run, this is the state in which the program started. `say` is
    called with messages about the progress::

        reproduce("experiments/20261115_181530", "again")
    """
    run = Path(run)
    if not run.is_dir():
        raise NotFound(f"{run} is not a folder")
    target = Path(out or f"{run.resolve().name}_reproduced").absolute()
    job = _Job(run, target, say)
    created = not target.exists()
    try:
        target.mkdir(mode=folder_mode(), parents=True, exist_ok=True)
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


class _Job:
    def __init__(self, run: Path, out: Path, say: Callable[[str], None]) -> None:
        self._run = run
        self._out = out
        self._say = say
        runtime = load(run, "runtime_info", StoredRuntime)
        if runtime is None:
            raise NotFound(
                f"{run} cannot be reproduced: it has no readable runtime_info.json; "
                "tap.init() creates folders that can"
            )
        self._runtime = runtime
        self._packages = load(run, "packages", StoredPackages)
        self._git_info = load(run, "git_info", StoredGit) or StoredGit()
        self._project = self._git_info.project
        self.missing: list[str] = []
        self.notes: list[str] = []

    def run(self, repo: str | None) -> Reproduced:
        project = self._restore_project(repo)
        self._restore_packages()
        recipe = Recipe(self._runtime, self._project.repository, project)
        (self._out / "environment.sh").write_text(recipe.environment(), "utf-8")
        restrict(self._out / "environment.sh")  # secrets are filled in there
        script = self._out / "run.sh"
        script.write_text(recipe.script(self._run), "utf-8")
        script.chmod(0o700)  # secrets may be filled in there as well
        self.missing += recipe.missing
        self.notes += recipe.notes
        modified = list(self._git_info.modifications)
        if modified:
            self.notes.append(f"the program replaced {len(modified)} functions: {_few(modified)}")
        missing, notes = (tuple(map(printable, texts)) for texts in (self.missing, self.notes))
        lines = [f"Created from the run {printable(str(self._run))}. Start it with: sh run.sh", ""]
        if missing:
            lines += ["Could not be restored:", *(f"- {text}" for text in missing), ""]
        if notes:
            lines += ["Notes:", *(f"- {text}" for text in notes), ""]
        (self._out / "README.txt").write_text("\n".join(lines), "utf-8")
        return Reproduced(self._out, script, missing, notes)

    # -- code --------------------------------------------------------------------------------

    def _restore_project(self, repo: str | None) -> Path | None:
        changes = len(numbers(self._run, "git_info"))
        if changes:
            self.notes.append(
                f"the code changed {changes} times during the run; this is the state at its start"
            )
        info = self._project
        if not info.commit_id and not info.patch:
            self.missing.append(f"the code: its git status was {info.status!r} when it ran")
            return None
        project = self._out / "project"
        if info.commit_id:
            self._say(f"checking out {info.commit_id[:12]} into {project}")
            self._fetch(self._sources(repo), project)
        else:  # a repository before its first commit: the patch is everything
            _new_repository(project)
        if os.path.lexists(project / ".gitmodules"):
            self.missing.append("the submodules: git submodule update --init in project/")
        self._apply(project)
        for item in info.untracked.left_out:
            self.missing.append(f"untracked {item.path} ({format_size(item.size)}): {item.reason}")
        if info.error:
            self.missing.append(f"changes to the code: {info.error}")
        with contextlib.suppress(OSError, CorruptFile):
            if b"filter=" in read_small(project, ".gitattributes", 1 << 20):
                self.notes.append("git filters did not run; for LFS: git lfs pull in project/")
        return project

    def _sources(self, repo: str | None) -> list[str]:
        """Return where the commit may be: what the user has named, or where the project was."""
        if repo is not None:
            if os.path.isdir(repo):
                return [os.path.abspath(repo)]
            if not _ADDRESS.fullmatch(repo):
                raise NotFound(f"{repo} is neither a folder nor an address")
            return [repo]
        info = self._project
        places = [place for place in (info.repository, info.git_dir) if os.path.isabs(place)]
        run = os.path.realpath(self._run)
        real = [os.path.realpath(place) for place in places if os.path.isdir(place)]
        # not those in the run: it may bring repositories
        found = [place for place in real if os.path.commonpath([run, place]) != run]
        if not found:
            old = " or ".join(places) or "a known place"
            hint = f"; it was cloned from {info.remote}" if info.remote else ""
            raise NotFound(
                printable(f"the repository is no longer at {old}{hint}")
                + "; name a clone of it, or a URL, with --repo"
            )
        return found

    def _fetch(self, sources: list[str], project: Path) -> None:
        """Check out the commit into a new repository."""
        git, commit = _new_repository(project), self._project.commit_id
        for source in sources:
            try:
                git.run(
                    "fetch", "--quiet", "--no-tags", "--update-shallow", "--no-recurse-submodules",
                    "--", source, commit,
                )  # fmt: skip
            except GitFailed as failed:
                error = failed
                continue
            git.run("checkout", "--quiet", "--detach", commit)
            return
        branch = self._project.branch
        hint = f" (it was on branch {branch})" if branch not in ("", "(detached)") else ""
        raise NotFound(
            printable(
                f"commit {commit} cannot be fetched from {sources[-1]}{hint}; perhaps it was never "
                f"pushed, or is on another branch: {error}"
            )
        )

    def _apply(self, project: Path) -> None:
        info = self._project
        name = info.patch
        if not name:
            return
        try:
            patch = read_small(self._run, name, MAX_PATCH)
        except (OSError, CorruptFile) as error:
            reason = getattr(error, "strerror", None) or error
            self.missing.append(f"uncommitted changes: {name} is not in the run ({reason})")
            return
        if info.patch_sha256 and hashlib.sha256(patch).hexdigest() != info.patch_sha256:
            self.missing.append(f"{name} is not the patch that git_info.json refers to")
        self._say(f"applying {name}")
        if info.redacted_lines:
            self.missing.append(f"secrets in {info.redacted_lines} lines: look for *** in project/")
        try:
            Git(project, timeout=TIMEOUT, isolated=True).run(
                "-c", "apply.ignoreWhitespace=no", "-c", "core.autocrlf=false",
                "apply", "--whitespace=nowarn", "-", stdin=patch,
            )  # fmt: skip
        except GitFailed as error:
            self.missing.append(f"uncommitted changes: {name} does not apply: {error}")

    # -- packages ----------------------------------------------------------------------------

    def _restore_packages(self) -> None:
        if self._packages is None:
            self.missing.append("the packages: packages.json is not in the run")
            return
        text, missing = requirements(self._packages, self._git_info.packages)
        (self._out / "requirements.txt").write_text(text, "utf-8")
        self.missing += missing
        python = self._packages.python_version
        if python and python != platform.python_version():
            self.missing.append(f"Python {python}: this is {platform.python_version()}")


def _new_repository(folder: Path) -> Git:
    folder.mkdir(exist_ok=True)
    git = Git(folder, timeout=TIMEOUT, isolated=True)
    git.run("init", "--quiet")
    return git


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
