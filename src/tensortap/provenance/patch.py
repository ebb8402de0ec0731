"""The uncommitted changes of a repository as one patch for ``git apply``.

A patch holds staged and unstaged changes, binary files, modes, and those untracked files that are
not ignored and fit into a limit. The user's index and objects are only read: untracked files go
into a copy of the index, and their contents into a temporary object folder. Credentials in it are
hidden: the patch applies, and `reproduce` tells which lines have to be filled in.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tensortap.files import CorruptFile, read_small, restrict
from tensortap.limits import format_size, parse_size
from tensortap.provenance.gitcmd import Git, GitFailed
from tensortap.provenance.pace import Pace
from tensortap.provenance.redact import HIDDEN, Redactor, is_credential_file

UNTRACKED_LIMIT = parse_size("16 MiB")  # all untracked files of a patch together
LISTED = 100  # how many of the files that are left out are named

# options that override whatever the user has configured for reading diffs
_DIFF = (
    "diff", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color",
    "--no-renames", "--src-prefix=a/", "--dst-prefix=b/", "--unified=3", "--inter-hunk-context=0",
    "--submodule=short", "--ignore-submodules=dirty", "--ws-error-highlight=none",
    "--no-relative", "--word-diff=none", "--patch",
)  # fmt: skip
_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
# files in which a secret is a string in quotes
_CODE = tuple(".py .pyi .pyx .ipynb .c .h .cc .cpp .cu .cuh .js .ts .java .go .rs .jl".split())
_BLOCK = 4 << 10  # bytes of a patch that are searched at once: training waits for that long
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
        is_file = stat.S_ISREG(status.st_mode)
        if path.endswith("/"):
            chosen.leave_out(path, 0, "a repository of its own")
        elif is_credential_file(full.name):
            chosen.leave_out(path, status.st_size, "its name suggests that it holds credentials")
        elif not (is_file or stat.S_ISLNK(status.st_mode)):
            chosen.leave_out(path, 0, "not a file")
        elif is_file and not os.access(full, os.R_OK):
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
    try:
        git.run(*command, environ=alone, stdin=names)
    except GitFailed:  # a sparse index has to be read with its trees
        git.run(*command, environ=environ, stdin=names)


class PatchLine(NamedTuple):
    """A line of a patch: "+", "-" or " " with its place in a file, or "" outside of hunks."""

    kind: str
    text: bytes  # with the newline
    path: str = ""
    number: int = 0


def patch_lines(lines: Iterable[bytes]) -> Iterator[PatchLine]:
    """Yield the lines of a patch with their places in the old file, or in the new one for "+"."""
    paths = {"-": "", "+": ""}
    at, left = {"-": 0, "+": 0}, {"-": 0, "+": 0}
    for line in lines:
        kind = line[:1].decode("latin-1")
        if max(left.values()) > 0 and kind in ("+", "-", " "):
            side = "+" if kind == "+" else "-"
            yield PatchLine(kind, line, paths[side], at[side])
            for each in ("-", "+") if kind == " " else (side,):
                at[each] += 1
                left[each] -= 1
            continue
        yield PatchLine("", line)
        if head := _HUNK.match(line):
            numbers = [int(number) if number is not None else 1 for number in head.groups()]
            at["-"], left["-"], at["+"], left["+"] = numbers
        elif line.startswith((b"--- ", b"+++ ")):
            paths[kind] = _unquoted(line[4:].rstrip(b"\r\n").removesuffix(b"\t"))


def _unquoted(path: bytes) -> str:
    """Return a path of a patch, which git quotes if it has special characters."""
    if path.startswith(b'"'):
        path = path.strip(b'"').decode("unicode_escape", "replace").encode("latin-1", "replace")
    return os.fsdecode(path[2:] if path[:2] in (b"a/", b"b/") else path)


def redact_patch(
    file: Path, redactor: Redactor, untracked: Collection[str], pace: Pace
) -> list[int]:
    """Hide credentials in a patch, and return the numbers of the lines that were changed.

    Numbers of lines stay the same. Files in `untracked` are also searched for random words.
    """
    redacted: list[int] = []
    partial = file.with_name(f"{file.name}.partial")
    section = PatchSection(redactor, untracked)
    number = 0  # of the lines before
    pace.resume()  # git was waited for
    with file.open("rb") as source, partial.open("wb") as out:
        restrict(partial)
        while block := source.readlines(_BLOCK):
            pace()
            starts = [i for i, line in enumerate(block) if line.startswith(b"diff --git ")]
            for start, end in itertools.pairwise([0, *starts, len(block)]):
                if start == end:  # the block starts with a new file
                    continue
                lines = section.redacted(block[start:end])
                redacted += [
                    number + i + 1 for i, line in lines.items() if block[start + i] != line
                ]
                for i, line in lines.items():
                    block[start + i] = line
                number += end - start
            out.writelines(block)
    os.replace(partial, file)
    return redacted


class PatchSection:
    """Redacts the part of a patch that changes one file, in blocks of lines."""

    def __init__(self, redactor: Redactor, untracked: Collection[str]) -> None:
        self._redactor = redactor
        self._untracked = untracked
        self._path = ""
        self._in_hunks = False
        self._in_key = False  # a private key goes on

    def redacted(self, lines: list[bytes]) -> dict[int, bytes]:
        """Return the lines that may hold credentials, redacted, by their index."""
        first = self._read_head(lines)
        body = lines[first:]
        code, entropy = self._path.endswith(_CODE), self._path in self._untracked
        if self._in_key or any(b"PRIVATE KEY" in line for line in body):
            suspects: Iterable[int] = range(len(body))
        else:
            suspects = self._redactor.suspects(body, entropy=entropy)
        found = {}
        for index in suspects:
            line = body[index]
            stripped = line.rstrip(b"\r\n")
            text = stripped[1:].decode("utf-8", "surrogateescape")
            if line[:1] not in b"+- ":  # the head of a hunk, or "no newline at end of file"
                self._in_key = self._in_key and line[:1] == b"\\"
            hidden = (
                HIDDEN
                if self._in_key
                else self._redactor.text(text, literals_only=code, entropy=entropy)
            )
            if "PRIVATE KEY" in text:
                self._in_key = "BEGIN" in text and "END" not in text
            found[first + index] = (
                line[:1] + hidden.encode("utf-8", "surrogateescape") + line[len(stripped) :]
            )
        return found

    def _read_head(self, lines: list[bytes]) -> int:
        """Read what comes before the hunks; return the number of its lines."""
        if lines[0].startswith(b"diff --git "):
            self._path, self._in_hunks, self._in_key = "", False, False
        for index, line in enumerate(lines):
            if self._in_hunks or line.startswith(b"@@ "):
                self._in_hunks = True
                return index
            if line.startswith((b"--- ", b"+++ ")) and line[4:].strip() != b"/dev/null":
                self._path = _unquoted(line[4:].rstrip(b"\r\n").removesuffix(b"\t"))
        return len(lines)


def fill_redacted(patch: bytes, redacted: Iterable[int], project: Path) -> tuple[bytes, list[str]]:
    """Return a patch that applies, and the places of secrets that the user has to fill in.

    Hidden lines of the old files are taken from the project; those of the new files stay hidden.
    """
    hidden = frozenset(redacted)
    if not hidden:
        return patch, []
    files: dict[str, list[bytes]] = {}
    filled, needed = io.BytesIO(), []
    for number, line in enumerate(patch_lines(io.BytesIO(patch)), 1):
        text = line.text
        if number in hidden and line.kind == "+":
            needed.append(f"{line.path}, line {line.number}")
        elif number in hidden and line.kind:
            if line.path not in files:
                files[line.path] = _lines_of(project, line.path)
            if 0 < line.number <= len(files[line.path]):
                text = line.text[:1] + files[line.path][line.number - 1]
        filled.write(text)
    return filled.getvalue(), needed


def _lines_of(project: Path, path: str) -> list[bytes]:
    try:
        data = read_small(project, path, UNTRACKED_LIMIT)
    except (OSError, CorruptFile):
        return []
    return io.BytesIO(data).readlines()
