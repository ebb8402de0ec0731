"""The uncommitted changes of a repository as one patch for ``git apply``.

A patch holds staged and unstaged changes, binary files, modes, and those untracked files that are
not ignored and fit into a limit. The user's index and objects are only read: untracked files go
into a copy of the index, and their contents into a temporary object folder. Credentials in it are
hidden. The patch applies unless a line that was there before held one.
"""

from __future__ import annotations

import operator
import os
import re
import shutil
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tensortap.core.files import restrict
from tensortap.core.limits import format_size, parse_size
from tensortap.rooms.provenance.gitcmd import Git, GitFailed
from tensortap.rooms.provenance.redact import Redactor, is_credential_file

UNTRACKED_LIMIT = parse_size("1 MiB")  # all untracked files of a patch together
# Redaction of that much takes one to two seconds in the background; changes to code are smaller.
MAX_PATCH = parse_size("4 MiB")
LISTED = 100  # how many of the files that are left out are named

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
        """Note a file that is not in the patch."""
        self.left_out_count += 1
        if len(self.left_out) < LISTED:
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
    """Add files to our copy of the index."""
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
