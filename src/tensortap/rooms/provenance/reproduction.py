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
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.files import CorruptFile, contained, folder_mode, plain, read_small, restrict
from tensortap.core.limits import format_size
from tensortap.rooms.provenance.git import MAX_PATCH, Git, GitFailed
from tensortap.rooms.provenance.redact import HIDDEN
from tensortap.rooms.provenance.stored import (
    StoredGit,
    StoredPackage,
    StoredPackages,
    StoredRepository,
    StoredRuntime,
    load,
    numbers,
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
        missing, notes = (tuple(map(plain, texts)) for texts in (self.missing, self.notes))
        lines = [f"Created from the run {plain(str(self._run))}. Start it with: sh run.sh", ""]
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
                plain(f"the repository is no longer at {old}{hint}")
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
            plain(
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


# -- requirements.txt, environment.sh and run.sh -----------------------------------------

_TORCH_INDEX = "https://download.pytorch.org/whl/"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_SOURCE = re.compile(r"(git|hg|svn|bzr)\+(https?|ssh|git|file)://[!-~]+@[A-Za-z0-9][\w./-]*", re.A)
# variables of the shell in which it ran (a terminal, a login, a virtual environment), and those
# that launchers set for each process
_SHELL = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|TERM|TERM_\w+|COLORTERM|DISPLAY|XAUTHORITY"
    r"|WAYLAND_DISPLAY|SSH_\w+|DBUS_\w+|XDG_\w+|MAIL|LS_COLORS|LESS\w*|HOST|HOSTNAME|EDITOR|VISUAL"
    r"|PAGER|WINDOWID|TMUX\w*|STY|VIRTUAL_ENV\w*|CONDA_\w+|PYENV_\w+|PS1|TMPDIR|TEMP|TMP|LINES"
    r"|COLUMNS|INVOCATION_ID|JOURNAL_STREAM|JPY_\w+|VSCODE_\w+|PYTEST_\w+|SLURM_\w+|MANPATH"
    r"|INFOPATH|__\w+"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|TORCH_NCCL_ASYNC_ERROR_HANDLING"
)


def requirements(
    packages: StoredPackages, checkouts: Mapping[str, StoredRepository]
) -> tuple[str, list[str]]:
    """Return requirements.txt, and which packages are on no index.

    >>> requirements(StoredPackages("3.12.1", {"numpy": "2.1.0"}), {})[0]
    '# Python 3.12.1\\nnumpy==2.1.0\\n'
    """
    lines: list[str] = []
    missing: list[str] = []
    indexes: dict[str, None] = {}
    for name, version in packages.all_packages.items():
        info = packages.packages.get(name, StoredPackage())
        if not _NAME.fullmatch(name) or not _VERSION.fullmatch(version):
            lines.append(f"# {plain(name)}=={plain(version)}: not a valid requirement")
            missing.append(f"{name} {version}: not a valid requirement")
        elif name == "pip":
            lines.append(f"# pip=={version}")
        elif not info.url:
            label = version.partition("+")[2]
            if re.fullmatch(r"cpu|cu[0-9]+|rocm[0-9.]+|xpu", label):
                indexes[f"--extra-index-url {_TORCH_INDEX}{label}"] = None
            elif label:
                missing.append(f"{name} {version}: a local version, probably on no index")
            lines.append(f"{name}=={version}")
        elif info.commit_id and HIDDEN not in info.url:
            source = f"{info.vcs}+{info.url}@{info.commit_id}"
            lines.append(f"{'' if _SOURCE.fullmatch(source) else '# '}{name} @ {plain(source)}")
        else:
            origin = _checkout_origin(info, checkouts.get(name, StoredRepository()))
            lines.append(f"# {name}=={version}: {plain(origin)}")
            if not origin.endswith("part of project/"):
                missing.append(f"{name} {version}: {origin}")
    first = f"# Python {plain(packages.python_version)}"
    return "\n".join([first, *indexes, *lines, ""]), missing


def _checkout_origin(info: StoredPackage, checkout: StoredRepository) -> str:
    origin = f"{'editable' if info.editable else 'installed'} from {info.source or info.url}"
    if checkout.commit_id:
        origin += f", commit {checkout.commit_id} ({checkout.status})"
    if checkout.same_as == "project":
        origin += ", part of project/"
    return origin


class Recipe:
    """environment.sh and run.sh; paths in the old project point into the new one."""

    def __init__(self, runtime: StoredRuntime, old: str, new: Path | None) -> None:
        command = runtime.command
        self._executable = command.executable
        self._launcher = command.launcher
        self._old = old.rstrip("/")
        self._new = new
        self._variables = runtime.environment_variables
        self.missing: list[str] = []
        self.notes: list[str] = []
        try:
            words = shlex.split(command.launcher or command.full_command)
        except ValueError:  # quotes that do not match
            words = []
        self.command = self._make_command(words)
        self._folder = self._working_directory(runtime.working_directory)

    def environment(self) -> str:
        exports: list[str] = []
        hidden: list[str] = []
        shell: list[str] = []
        for name, value in self._variables.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
                continue  # functions that bash exports
            line = f"export {name}={self._relocated(value)}"
            comment = "# " + plain(line, len(line))
            if HIDDEN in value:
                hidden.append(name)
                exports.append(f"{comment.replace(shlex.quote(HIDDEN), '')}  # a secret: fill in")
            elif _SHELL.fullmatch(name):
                shell.append(comment)
            else:
                exports.append(line)
        if hidden:
            self.missing.append(
                f"secrets: fill in {', '.join(hidden)} in environment.sh, or set them in the shell"
            )
        size = self._variables.get("WORLD_SIZE", "1")
        if not self._launcher and size.isdigit() and int(size) > 1:
            self.missing.append(
                f"the launcher: the run was one of {size} processes, and what started them is "
                "not known"
            )
        lines = ["# sourced by run.sh", *exports, "", "# of the old shell and launcher", *shell]
        return "\n".join(lines) + "\n"

    def script(self, run: Path) -> str:
        check = "echo 'replace *** in run.sh, then delete this line' >&2; exit 1\n"
        return (
            "#!/bin/sh\n"
            f"# runs {plain(str(run))} again; PYTHON=… chooses the interpreter\n"
            "set -e\n"
            'here=$(cd "$(dirname "$0")" && pwd)\n'
            '. "$here/environment.sh"\n'
            f"cd {self._folder}\n"
            f"{check if HIDDEN in self.command else ''}"
            f"exec {self.command}\n"
        )

    def _make_command(self, words: list[str]) -> str:
        if not words or "\0" in "".join(words):
            self.missing.append("the command: it was not recorded")
            return "true"
        shell = []
        if words[0] == self._executable or os.path.basename(words[0]).startswith("python"):
            shell.append('"${PYTHON:-python3}"')
            binaries = os.path.dirname(words[0])
            words = words[1:]
            if words and binaries and os.path.dirname(words[0]) == binaries:
                # torchrun, accelerate: scripts of the old environment
                shell.append(f'"$(command -v {shlex.quote(os.path.basename(words[0]))})"')
                words = words[1:]
        if not words:
            self.missing.append("the program: it was typed into an interactive Python")
        elif any("ipykernel" in word for word in words[:2]):
            self.missing.append("the program: it ran in a notebook")
        if any(HIDDEN in word for word in words):
            self.missing.append("secrets of the command: replace *** in run.sh")
        return " ".join([*shell, *map(self._relocated, words)])

    def _working_directory(self, old: str) -> str:
        if self._new is not None and self._inside(old):
            rest = old[len(self._old) :].strip("/")
            folder = contained(self._new, rest)
            folder.mkdir(parents=True, exist_ok=True)  # git keeps no empty folders
            return '"$here"/' + shlex.quote(os.path.join("project", rest).rstrip("/"))
        if os.path.isdir(old):
            self.notes.append(f"it runs in {old}, as it did before, not in the new folder")
        else:
            self.missing.append(f"the working directory {old}: it does not exist")
        return shlex.quote(old)

    def _inside(self, path: str) -> bool:
        return bool(self._old) and (path == self._old or path.startswith(f"{self._old}/"))

    def _relocated(self, text: str) -> str:
        """Quote a word for the shell; paths that exist in the new project point there."""
        parts = re.split(r"([:=])", text)
        for i, part in enumerate(parts):
            if self._new is not None and self._inside(part):
                moved = self._new / part[len(self._old) :].lstrip("/")
                parts[i] = str(moved) if moved.exists() else part
        return shlex.quote("".join(parts))
