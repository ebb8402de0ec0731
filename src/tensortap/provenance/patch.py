"""The uncommitted changes of a repository as one patch that ``git apply`` takes.

Staged and unstaged changes, binary files, modes, and untracked files that are not ignored, as long
as they fit a limit. The user's index and objects are only read: untracked files go into a copy of
the index, and their contents into an object folder that is thrown away.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tensortap.limits import format_size, parse_size
from tensortap.provenance.gitcmd import Git, GitFailed
from tensortap.provenance.redact import is_credential_file

UNTRACKED_LIMIT = parse_size("16 MiB")  # all untracked files of a patch together
LISTED = 100  # how many left out files are named

# Whatever the user has configured for reading diffs, git apply gets what it expects.
_DIFF = (
    "diff", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color",
    "--no-renames", "--src-prefix=a/", "--dst-prefix=b/", "--unified=3", "--inter-hunk-context=0",
    "--submodule=short", "--ignore-submodules=dirty", "--ws-error-highlight=none",
    "--no-relative", "--word-diff=none", "--patch",
)  # fmt: skip
_MARKS = ("run.json", "runtime_info.json")  # a folder that holds one of these is a run


@dataclass(slots=True)
class Untracked:
    """Which untracked files a patch has, and which it has not, with the reason."""

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
    """Write all that differs from ``base`` into a file, and say what was left out.

    ``git`` must be at the top of the work tree; ``skip`` are folders to leave out.
    """
    untracked = choose_untracked(git, limit=limit, skip=skip)
    with file.open("wb") as out:
        if not untracked.included:
            git.run(*_DIFF, base, stdout=out)
        else:
            with tempfile.TemporaryDirectory(prefix="tensortap-git-") as scratch:
                environ = _own_index(git, Path(scratch))
                _add(git, untracked.included, environ)
                git.run(*_DIFF, base, environ=environ, stdout=out)
    return untracked


def _add(git: Git, paths: list[str], environ: dict[str, str]) -> None:
    """Add files to an index of our own."""
    names = b"\0".join(os.fsencode(path) for path in paths) + b"\0"
    # --remove: a file that has vanished since is no error
    command = ("update-index", "--add", "--remove", "-z", "--stdin")
    # Not knowing the repository's objects: git would touch those that it finds there again.
    alone = {k: v for k, v in environ.items() if k != "GIT_ALTERNATE_OBJECT_DIRECTORIES"}
    try:
        git.run(*command, environ=alone, stdin=names)
    except GitFailed:  # a sparse index has to be read with its trees
        git.run(*command, environ=environ, stdin=names)


def choose_untracked(git: Git, *, limit: int, skip: tuple[Path, ...]) -> Untracked:
    """The untracked files that go into the patch: small ones first, until the limit."""
    listed = git.run("ls-files", "--others", "--exclude-standard", "-z")
    chosen = Untracked()
    runs = _Runs(git.folder, skip)
    sizes: list[tuple[int, str]] = []
    for raw in listed.split(b"\0"):
        path = os.fsdecode(raw)
        if not path:
            continue
        if runs.contain(path):
            chosen.in_runs += 1
            continue
        full = git.folder / path
        try:
            seen = full.lstat()
        except OSError:
            continue  # gone already
        if path.endswith("/"):
            chosen.leave_out(path, 0, "a repository of its own")
        elif is_credential_file(full.name):
            chosen.leave_out(path, seen.st_size, "its name is that of a file with credentials")
        elif not (stat.S_ISREG(seen.st_mode) or stat.S_ISLNK(seen.st_mode)):
            chosen.leave_out(path, 0, "not a file")
        elif stat.S_ISREG(seen.st_mode) and not os.access(full, os.R_OK):
            chosen.leave_out(path, seen.st_size, "not readable")
        else:
            sizes.append((seen.st_size, path))
    room = limit
    for size, path in sorted(sizes):
        if size > room:
            chosen.leave_out(path, size, f"over the limit of {format_size(limit)} together")
        else:
            room -= size
            chosen.included.append(path)
    chosen.included.sort()
    return chosen


class _Runs:
    """The folders in a work tree that are runs: what they hold is output, not source."""

    def __init__(self, top: Path, skip: tuple[Path, ...]) -> None:
        self._top = top
        self._known: dict[str, bool] = {"": False}
        for folder in skip:
            for known in (folder.absolute(), Path(os.path.realpath(folder))):
                try:
                    inside = str(known.relative_to(os.path.realpath(top)))
                except ValueError:
                    continue
                if inside != ".":
                    self._known[inside] = True

    def contain(self, path: str) -> bool:
        folder = os.path.dirname(path.rstrip("/")) if not path.endswith("/") else path.rstrip("/")
        return self._is_run(folder)

    def _is_run(self, folder: str) -> bool:
        if folder not in self._known:
            here = self._top / folder
            self._known[folder] = self._is_run(os.path.dirname(folder)) or any(
                (here / mark).is_file() for mark in _MARKS
            )
        return self._known[folder]


def _own_index(git: Git, scratch: Path) -> dict[str, str]:
    """A copy of the index, and an object folder on top of the repository's."""
    index = Path(git.text("rev-parse", "--git-path", "index"))
    objects = git.folder / git.text("rev-parse", "--git-path", "objects")
    own = scratch / "index"
    try:
        with (git.folder / index).open("rb") as source, own.open("wb") as copy:
            shutil.copyfileobj(source, copy)
            seen = os.fstat(source.fileno())
        # By the age of the index git knows which files may have changed unnoticed since.
        os.utime(own, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    except FileNotFoundError:
        pass  # nothing was ever added
    except OSError as error:
        raise GitFailed(f"the index cannot be read: {error}") from error
    (scratch / "objects").mkdir()
    quoted = str(objects.absolute()).replace("\\", "\\\\").replace('"', '\\"')
    return {
        "GIT_INDEX_FILE": str(own),
        "GIT_OBJECT_DIRECTORY": str(scratch / "objects"),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": f'"{quoted}"',
    }
