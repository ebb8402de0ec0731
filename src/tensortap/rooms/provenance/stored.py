"""The provenance files of a run as untrusted data: somebody else may have chosen every byte.

Types and forms are checked here. What is used as a path, a line or an argument is also checked
where it is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from tensortap.core.errors import TensortapError
from tensortap.rooms.provenance import versions

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
    redacted_lines: list[int] = []
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
    number = next(iter(versions.numbers(run, stem)), None)
    content = versions.read_version(run, stem, number)
    if content is None:
        return None
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        name = versions.numbered(f"{stem}.json", number)
        raise TensortapError(f"{name} of {printable(str(run))} is not valid: {error}") from None


def printable(text: str, most: int = 1000) -> str:
    r"""Return text for a terminal and for one line of a file.

    >>> printable("a\nb\x1b[31m")
    'a b [31m'
    """
    return "".join(c if c.isprintable() else " " for c in text[:most])
