"""The provenance files of a run: how they are written, and how they are read again.

The newest version has the plain name: ``git_info.json`` is always the newest. When something
changes, the previous version becomes ``git_info.1.json``, the next one ``git_info.2.json``: the
lowest number is the oldest, the state in which the program started. Patches have the number of the
``git_info`` that refers to them (``project.1.patch``). Every file is complete when it gets
its name.

Read again they are untrusted data: somebody else may have chosen every byte. Types and forms are
checked here. What is used as a path, a line or an argument is also checked where it is used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from tensortap.core.errors import TensortapError
from tensortap.core.files import CorruptFile, plain, read_small, restrict
from tensortap.core.limits import parse_size

KEPT = 100  # versions of a file
MAX_JSON = parse_size("8 MiB")


def numbers(folder: Path, stem: str) -> list[int]:
    """Return the numbers of the older versions, oldest first.

    >>> numbers(Path("/nowhere"), "git_info")
    []
    """
    middles = [file.name[len(stem) + 1 : -5] for file in folder.glob(f"{stem}.*.json")]
    return sorted(int(middle) for middle in middles if re.fullmatch(r"[1-9][0-9]{0,8}", middle))


def numbered(name: str, number: int | None) -> str:
    """Return the file name of a version.

    >>> numbered("project.patch", 2)
    'project.2.patch'
    """
    if number is None:
        return name
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{number}{dot}{suffix}"


def read_version(folder: Path, stem: str, number: int | None = None) -> dict[str, Any] | None:
    """Return one version of a file (None is the newest), or None if it cannot be read."""
    try:
        text = read_small(folder, numbered(f"{stem}.json", number), MAX_JSON)
        content = msgspec.json.decode(text)
    except (OSError, ValueError, RecursionError, msgspec.DecodeError, CorruptFile):
        return None
    return content if isinstance(content, dict) else None


def write(folder: Path, stem: str, info: Mapping[str, Any], *, keep: bool) -> None:
    """Make `info` the newest version; with `keep`, archive the one before it."""
    if keep:
        archive(folder, stem)
    _write(folder / f"{stem}.json", json.dumps(info, indent=2, ensure_ascii=False).encode())


def archive(folder: Path, stem: str, patch: str = "") -> None:
    """Copy the newest version and its patch to the next number, if there are not too many."""
    number = (numbers(folder, stem) or [0])[-1] + 1
    file = folder / f"{stem}.json"
    if not file.exists() or number > KEPT:
        return
    data = file.read_bytes()
    if patch and (folder / patch).exists():
        _write(folder / numbered(patch, number), (folder / patch).read_bytes())
        data = data.replace(f'"See {patch}"'.encode(), f'"See {numbered(patch, number)}"'.encode())
    _write(folder / numbered(file.name, number), data)


def _write(target: Path, data: bytes) -> None:
    """Write a file that is complete when it gets its name."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.touch()
        restrict(partial)
        partial.write_bytes(data)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


# -- reading what a stranger may have written --------------------------------------------

_Kind = TypeVar("_Kind")
CommitId = Annotated[str, Meta(pattern=r"\A([0-9a-f]{40}|[0-9a-f]{64})?\Z")]
PatchReference = Annotated[str, Meta(pattern=r"\A(See project\.([0-9]{1,9}\.)?patch)?\Z")]


class StoredCommand(Struct, frozen=True):
    """The command of the program."""

    executable: str = ""
    full_command: str = ""
    launcher: str = ""


class StoredRuntime(Struct, frozen=True):
    """The fields of runtime_info.json that tensortap reads."""

    command: StoredCommand = StoredCommand()
    environment_variables: dict[str, str] = {}
    working_directory: str = ""


class StoredPackage(Struct, frozen=True):
    """The origin of a package."""

    url: str = ""
    source: str = ""
    editable: bool = False
    vcs: str = "git"
    commit_id: str = ""


class StoredPackages(Struct, frozen=True):
    """The fields of packages.json that tensortap reads."""

    python_version: str = ""
    all_packages: dict[str, str] = {}
    packages: dict[str, StoredPackage] = {}


class LeftOutFile(Struct, frozen=True):
    """An untracked file that is not in the patch."""

    path: str = ""
    size: int = 0
    reason: str = ""


class StoredUntracked(Struct, frozen=True):
    """The untracked files of a repository."""

    left_out: list[LeftOutFile] = []


class StoredRepository(Struct, frozen=True):
    """The state of a repository or a package."""

    commit_id: CommitId = ""
    branch: str = ""
    status: str = "not recorded"
    remote: str = ""
    repository: str = ""
    git_dir: str = ""
    git_diff: PatchReference = ""
    patch_sha256: str = ""
    redacted_lines: int = 0
    error: str = ""
    same_as: str = ""
    untracked: StoredUntracked = StoredUntracked()

    @property
    def patch(self) -> str:
        """The name of the patch file, or "" if there is none."""
        return self.git_diff.removeprefix("See ")


class StoredGit(Struct, frozen=True):
    """The fields of git_info.json that tensortap reads."""

    project: StoredRepository = field(default=StoredRepository(), name="project_git_info")
    packages: dict[str, StoredRepository] = field(default_factory=dict, name="packages_git_info")
    modifications: dict[str, Any] = field(default_factory=dict, name="runtime_modifications")


def load(run: Path, stem: str, kind: type[_Kind]) -> _Kind | None:
    """Return the version of a file with which the program started; raise if it is not valid.

    Return None if it cannot be read.
    """
    number = next(iter(numbers(run, stem)), None)
    content = read_version(run, stem, number)
    if content is None:
        return None
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        name = numbered(f"{stem}.json", number)
        raise TensortapError(f"{name} of {plain(str(run))} is not valid: {error}") from None
