"""Provenance files in a run folder: the newest under its plain name, older ones numbered.

``git_info.json`` is always the newest. When something changes, the previous version becomes
``git_info.1.json``, the next one ``git_info.2.json``: the lowest number is the oldest, the state
in which the program started. Patches have the number of the ``git_info`` that refers to them
(``project.1.patch``). Every file is complete when it gets its name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tensortap.core.files import CorruptFile, read_small, restrict
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
