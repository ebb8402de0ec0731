"""git_info.json and project.patch: which commit ran, with which changes, and from where.

``project_git_info`` always has the same keys. Where there is no repository they are empty, and
``status`` says why: "clean", "dirty", "not a repository" or "unknown" (with ``error``).

The patch is one for ``git apply``: staged and unstaged changes, binary files, modes, and those
untracked files that are not ignored and fit into a limit. The user's index and objects are only
read: untracked files go into a copy of the index, and their contents into a temporary object
folder. Credentials are hidden; the patch applies unless a line that was there before held one.

git runs without side effects: no lock, no hook, no prompt, no external program.
"""

from __future__ import annotations

import hashlib
import operator
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tensortap.core.files import restrict
from tensortap.core.limits import format_size, parse_size
from tensortap.rooms.provenance.redact import Redactor, is_credential_file
from tensortap.rooms.provenance.runtime import project_folder

TIMEOUT = 30.0  # seconds for a command; a network file system can be slow

# a hook or a rebase that started the program must not redirect git to another repository
_INHERITED = re.compile(
    r"(?!GIT_).*|GIT_(CONFIG_(GLOBAL|SYSTEM|NOSYSTEM|COUNT|KEY_\d+|VALUE_\d+)|SSH\w*|ASKPASS"
    r"|EXEC_PATH|CEILING_DIRECTORIES|DISCOVERY_ACROSS_FILESYSTEM|SSL_\w+|PROXY_\w+)"
)
_SETTINGS = {
    "core.fsmonitor": "false", "core.hooksPath": os.devnull, "core.quotePath": "true",
    "core.splitIndex": "false", "core.untrackedCache": "false", "core.safecrlf": "false",
    "core.pager": "cat", "color.ui": "false", "log.showSignature": "false", "gc.auto": "0",
    "maintenance.auto": "false", "diff.suppressBlankEmpty": "false", "diff.orderFile": os.devnull,
    "diff.autoRefreshIndex": "false",  # it would write the index even without optional locks
    "advice.detachedHead": "false", "init.defaultBranch": "main", "init.templateDir": "",
    "submodule.recurse": "false",
}  # fmt: skip
_ISOLATED = {
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_COUNT": "0",
    "GIT_ATTR_NOSYSTEM": "1", "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
}  # fmt: skip


class GitFailed(Exception):
    """git is not installed, took too long, or reported an error."""


class Git:
    """git in one folder.

    If it is `isolated`, the configuration of the user and of the machine has no effect: no filter,
    no credential helper, no rewritten address.

    >>> Git(Path(".")).text("--version").split()[:2]
    ['git', 'version']
    """

    def __init__(self, folder: Path, *, timeout: float = TIMEOUT, isolated: bool = False) -> None:
        self.folder = folder
        self.timeout = timeout
        self._isolated = isolated

    def run(
        self,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        stdout: IO[bytes] | None = None,
    ) -> bytes:
        """Return the output of a command; raise GitFailed with its error message."""
        program = shutil.which("git")
        if program is None:
            raise GitFailed("git is not installed")
        command = [program, "--no-pager", "--no-optional-locks", "--literal-pathspecs"]
        for name, value in _SETTINGS.items():
            command += ["-c", f"{name}={value}"]
        try:
            done = subprocess.run(
                [*command, *arguments],
                cwd=self.folder,
                env={**_environ(), **(_ISOLATED if self._isolated else {}), **(environ or {})},
                input=stdin,
                stdout=stdout if stdout is not None else subprocess.PIPE,
                stderr=subprocess.PIPE,
                timeout=self.timeout,
                check=False,
                start_new_session=True,  # Ctrl-C is for the training program
            )
        except subprocess.TimeoutExpired:
            raise GitFailed(f"git {arguments[0]} took longer than {self.timeout:g} s") from None
        except OSError as error:
            raise GitFailed(f"git cannot be run: {error}") from error
        if done.returncode:
            message = done.stderr.decode("utf-8", "replace").strip()
            raise GitFailed(f"git {arguments[0]}: {message or f'status {done.returncode}'}")
        return done.stdout or b""

    def text(self, *arguments: str) -> str:
        """Return the output of a command without the last newline."""
        return self.run(*arguments).decode("utf-8", "surrogateescape").removesuffix("\n")

    def ask(self, *arguments: str) -> str:
        """Return the output of a command, or "" if it fails."""
        try:
            return self.text(*arguments)
        except GitFailed:
            return ""


def _environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}
    return {
        **kept,
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "LC_ALL": "C",
    }


UNTRACKED_LIMIT = parse_size("1 MiB")  # all untracked files of a patch together
# Redaction of that much takes one to two seconds in the background; changes to code are smaller.
MAX_PATCH = parse_size("4 MiB")

# options that override whatever the user has configured for reading diffs
_DIFF = (
    "diff", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color",
    "--no-renames", "--src-prefix=a/", "--dst-prefix=b/", "--unified=3", "--inter-hunk-context=0",
    "--submodule=short", "--ignore-submodules=dirty", "--ws-error-highlight=none",
    "--no-relative", "--word-diff=none", "--patch",
)  # fmt: skip
_HUNKS = re.compile(r"^@@ .*?(?=^@@ |^diff --git |\Z)", re.MULTILINE | re.DOTALL)
_RUN_FILES = ("run.json", "runtime_info.json")  # a folder with one of these is a run


@dataclass(slots=True)
class Untracked:
    """The untracked files that a patch includes, and those it leaves out, with the reason."""

    included: list[str] = field(default_factory=list)
    left_out: list[dict[str, object]] = field(default_factory=list)
    left_out_count: int = 0
    in_runs: int = 0

    def leave_out(self, path: str, size: int, reason: str) -> None:
        self.left_out_count += 1
        if len(self.left_out) < 100:
            self.left_out.append({"path": path, "size": size, "reason": reason})


def write_patch(
    git: Git, base: str, file: Path, *, limit: int = UNTRACKED_LIMIT, skip: tuple[Path, ...] = ()
) -> Untracked:
    """Write all that differs from `base` into a file, and return what was left out.

    `git` must be at the top of the work tree; `skip` are folders to leave out.
    """
    untracked = _choose_untracked(git, limit, skip)
    with file.open("wb") as out, tempfile.TemporaryDirectory(prefix="tensortap-git-") as scratch:
        restrict(file)
        environ = None
        if untracked.included:
            environ = _copy_index(git, Path(scratch))
            _add(git, untracked.included, environ)
        git.run(*_DIFF, base, environ=environ, stdout=out)
    return untracked


def _choose_untracked(git: Git, limit: int, skip: tuple[Path, ...]) -> Untracked:
    """Choose the untracked files for the patch: the smallest first, up to the limit."""
    chosen = Untracked()
    top = os.path.realpath(git.folder)
    is_run = {os.path.relpath(os.path.realpath(folder), top): True for folder in skip}
    is_run |= {"": False, os.curdir: False}

    def in_run(folder: str) -> bool:  # its files are output, not source
        if folder not in is_run:
            is_run[folder] = in_run(os.path.dirname(folder)) or any(
                (git.folder / folder / name).is_file() for name in _RUN_FILES
            )
        return is_run[folder]

    sizes: list[tuple[int, str]] = []
    for raw in git.run("ls-files", "--others", "--exclude-standard", "-z").split(b"\0"):
        path = os.fsdecode(raw)
        if not path:
            continue
        if in_run(path.rstrip("/") if path.endswith("/") else os.path.dirname(path)):
            chosen.in_runs += 1
            continue
        full = git.folder / path
        try:
            status = full.lstat()
        except OSError:
            continue  # deleted in the meantime
        if path.endswith("/"):
            chosen.leave_out(path, 0, "a repository of its own")
        elif is_credential_file(full.name):
            chosen.leave_out(path, status.st_size, "its name suggests that it holds credentials")
        elif stat.S_ISREG(status.st_mode) and not os.access(full, os.R_OK):
            chosen.leave_out(path, status.st_size, "not readable")
        else:
            sizes.append((status.st_size, path))
    room = limit
    for size, path in sorted(sizes):
        if size > room:
            chosen.leave_out(path, size, f"over the limit of {format_size(limit)} together")
        else:
            room -= size
            chosen.included.append(path)
    chosen.included.sort()
    return chosen


def _copy_index(git: Git, scratch: Path) -> dict[str, str]:
    """Make git work on a copy of the index, and write objects to a folder of our own."""
    index = git.folder / git.text("rev-parse", "--git-path", "index")
    objects = git.folder / git.text("rev-parse", "--git-path", "objects")
    copy = scratch / "index"
    try:
        with index.open("rb") as source, copy.open("wb") as target:
            shutil.copyfileobj(source, target)
            status = os.fstat(source.fileno())
        # by the age of the index git knows which files may have changed unnoticed since
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    except FileNotFoundError:
        pass  # nothing was ever added
    except OSError as error:
        raise GitFailed(f"the index cannot be read: {error}") from error
    (scratch / "objects").mkdir()
    quoted = str(objects.absolute()).replace("\\", "\\\\").replace('"', '\\"')
    return {
        "GIT_INDEX_FILE": str(copy),
        "GIT_OBJECT_DIRECTORY": str(scratch / "objects"),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": f'"{quoted}"',
    }


def _add(git: Git, paths: list[str], environ: dict[str, str]) -> None:
    names = b"\0".join(os.fsencode(path) for path in paths) + b"\0"
    # --remove: a file that has been deleted in the meantime is no error
    command = ("update-index", "--add", "--remove", "-z", "--stdin")
    # without the repository's objects, because git would touch those that it finds there
    alone = {k: v for k, v in environ.items() if k != "GIT_ALTERNATE_OBJECT_DIRECTORIES"}
    git.run(*command, environ=alone, stdin=names)


def redact_patch(file: Path, redactor: Redactor) -> int:
    """Hide credentials in a patch, and return how many lines were changed.

    Lines stay lines. Only hunks are searched: the rest is names and binary files.
    """
    before = file.read_bytes().decode("utf-8", "surrogateescape")
    after = _HUNKS.sub(lambda hunk: redactor.text(hunk.group()), before)
    if after != before:
        file.write_bytes(after.encode("utf-8", "surrogateescape"))
    return sum(map(operator.ne, before.split("\n"), after.split("\n")))


def collect_git(
    scratch: Path,
    *,
    start: Path | None = None,
    packages: dict[str, dict[str, Any]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return git_info.json without the runtime modifications; write its patch into `scratch`.

    `start` is a folder of the project (default: that of the main script), `packages` is the
    "packages" of packages.json. `options` are those of `repository_info`.
    """
    project = repository_info(start or project_folder(), scratch / "project.patch", **options)
    editable: dict[str, Any] = {}
    for name, package in sorted((packages or {}).items()):
        location = package.get("source") if package.get("editable") else None
        git = Git(Path(location)) if location and os.path.isdir(location) else None
        if git is not None and (top := git.ask("rev-parse", "--show-toplevel")):
            dirty = bool(git.ask("status", "--porcelain", "--untracked-files=no"))
            editable[name] = {
                "location": location,
                "commit_id": git.ask("rev-parse", "--verify", "--quiet", "HEAD^{commit}"),
                "status": "dirty" if dirty else "clean",
                "same_as": "project" if top == project["repository"] else "",
            }
    return {"project_git_info": project, "packages_git_info": editable}


def repository_info(
    folder: Path,
    patch: Path,
    *,
    skip: tuple[Path, ...] = (),
    limit: int = UNTRACKED_LIMIT,
    timeout: float = TIMEOUT,
    redactor: Redactor | None = None,
) -> dict[str, Any]:
    """Describe the repository of a folder; write its changes, if there are any, into `patch`.

    `skip` are folders whose files do not belong into the patch, `limit` is the size of all
    untracked files in it.
    """
    redactor = redactor or Redactor()
    info: dict[str, Any] = {
        "commit_id": "", "branch": "", "status": "unknown", "git_log": [], "log_entries_count": 0,
        "git_diff": "", "remote": "", "repository": "", "git_dir": "",
    }  # fmt: skip
    git = Git(folder, timeout=timeout)
    try:
        common = git.text("rev-parse", "--git-common-dir")
        info["git_dir"] = str((folder / common).resolve())
    except GitFailed as error:
        if "not a git repository" in str(error):
            return {**info, "status": "not a repository", "error": f"no git repository at {folder}"}
        return {**info, "error": redactor.text(str(error))}
    info["commit_id"] = git.ask("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    branch = git.ask("symbolic-ref", "--short", "--quiet", "HEAD")
    info["branch"] = branch or "(detached)"
    remote = git.ask("ls-remote", "--get-url")  # that of the branch; "origin" if there is none
    info["remote"] = "" if remote == "origin" else redactor.text(remote)
    if info["commit_id"]:
        info["git_log"] = _log(git, redactor)
    info["log_entries_count"] = len(info["git_log"])
    try:
        info["repository"] = git.text("rev-parse", "--show-toplevel")
        git = Git(Path(info["repository"]), timeout=timeout)
        # before the first commit everything is a change to the empty tree
        base = info["commit_id"] or git.text("hash-object", "-t", "tree", "--stdin")
        untracked = write_patch(git, base, patch, limit=limit, skip=skip)
        if (size := patch.stat().st_size) > MAX_PATCH:
            info["status"] = "dirty"
            raise GitFailed(f"the patch has {format_size(size)}, the limit is 4 MiB")
        redacted = redact_patch(patch, redactor)
        info |= _changes(patch, untracked, limit)
        warnings = []
        if redacted:
            info["redacted_lines"] = redacted
            warnings.append(f"{redacted} lines of {patch.name} held credentials: ***")
        if Path(info["repository"], ".gitmodules").exists():
            warnings.append("submodules are stored as commits, without changes in them")
        if warnings:
            info["warnings"] = warnings
    except (GitFailed, OSError) as error:
        patch.unlink(missing_ok=True)
        info["error"] = f"the changes could not be saved: {redactor.text(str(error))}"
    return info


def _changes(patch: Path, untracked: Untracked, limit: int) -> dict[str, Any]:
    info: dict[str, Any] = {"git_diff": ""}
    if patch.stat().st_size:
        info["git_diff"] = f"See {patch.name}"
        # tells a new version, too
        info["patch_sha256"] = hashlib.sha256(patch.read_bytes()).hexdigest()
    else:
        patch.unlink()
    info["status"] = "dirty" if info["git_diff"] or untracked.left_out_count else "clean"
    info["untracked"] = {
        "included": len(untracked.included),
        "limit": format_size(limit),
        "left_out": untracked.left_out,
        "left_out_count": untracked.left_out_count,
        "files_of_runs_left_out": untracked.in_runs > 0,
    }
    return info


def _log(git: Git, redactor: Redactor) -> list[dict[str, str]]:
    try:
        out = git.run(
            "log", "-50", "-z", "--no-color", "--no-decorate", "--no-ext-diff",
            "--no-patch", "--encoding=UTF-8", "--format=%H%x1f%an%x1f%aI%x1f%s",
        )  # fmt: skip
    except GitFailed:
        return []
    entries = []
    for line in out.decode("utf-8", "replace").split("\0"):
        if line.strip("\n"):
            fields = line.strip("\n").split("\x1f", 3)
            entry = dict(zip(("commit", "author", "date", "message"), fields, strict=True))
            entries.append({**entry, "message": redactor.text(entry["message"])})
    return entries
