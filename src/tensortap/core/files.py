"""Open files that may come from strangers, and create files that only the user can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from tensortap.core.errors import TensortapError
from tensortap.core.limits import format_size
from tensortap.core.settings import flag


class CorruptFile(TensortapError):
    """A file of a run, or a file with tensors, that cannot be read."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading; raise CorruptFile unless it is a regular file.

    A pipe would block for ever, and a device may do anything.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(fd))
    except CorruptFile:
        os.close(fd)
        raise
    return open(fd, "rb")


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise CorruptFile unless a path is a regular file; for libraries that open it themselves."""
    _check(path, os.stat(path))


def _check(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CorruptFile(f"{os.fspath(path)} is not a regular file")


def leads_to(path: str | os.PathLike[str], fd: int) -> bool:
    """Return whether a path still leads to an open file or folder; False if it is gone."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


def contained(folder: Path, path: str | os.PathLike[str]) -> Path:
    """Return the path of a file in a folder; raise CorruptFile if it, or a link, leads out."""
    name, top = os.fspath(path), os.path.realpath(folder)
    if "\0" in name or os.path.commonpath([top, os.path.realpath(folder / name)]) != top:
        raise CorruptFile(f"{plain(name)!r} leads out of {folder}")
    return folder / name


def read_small(folder: Path, path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of a small file of a run, or of another folder of a stranger.

    Raise CorruptFile for a pipe, a device, a link out of the folder, and more than `limit` bytes.
    """
    file = contained(folder, path)
    with open_regular(file) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise CorruptFile(f"{file} has more than {format_size(limit)}, so it is not read")
    return data


def plain(text: str, longest: int = 500) -> str:
    """Return text without control characters, truncated: names and values may be hostile.

    >>> plain("a\\x1b[2Jb"), plain("long", 2)
    ('a�[2Jb', 'lo…')
    """
    printable = "".join(c if c.isprintable() else "�" for c in text[:longest])
    return printable if len(text) <= longest else f"{printable}…"


def file_mode() -> int:
    """Return the mode of a new file: for the user alone, or as the umask says."""
    return 0o666 if flag("TENSORTAP_SHARED") else 0o600


def folder_mode() -> int:
    """Return the mode of a new folder: for the user alone, or as the umask says."""
    return 0o777 if flag("TENSORTAP_SHARED") else 0o700


def restrict(path: Path) -> None:
    """Take the access of others from a file that a library has created, unless it is shared."""
    if not flag("TENSORTAP_SHARED"):
        os.chmod(path, 0o600)
