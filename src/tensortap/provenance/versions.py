"""Provenance files in a run folder: the newest under its plain name, older ones numbered.

``git_info.json`` is always the newest. When something changes, the previous version becomes
``git_info.1.json``, the next one ``git_info.2.json``: the lowest number is the oldest, the state
in which the program started. Patches have the number of the ``git_info`` that refers to them
(``project.1.patch``). Every file is complete when it gets its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tensortap.files import CorruptFile, read_small, restrict
from tensortap.limits import parse_size

KEPT = 100  # versions of a file
MAX_JSON = parse_size("8 MiB")


def current(folder: Path, stem: str) -> dict[str, Any] | None:
    """Return the newest version of a file, or None if it does not exist or is damaged."""
    return read_version(folder, stem, None)


def numbers(folder: Path, stem: str) -> list[int]:
    """Return the numbers of the older versions, oldest first.

    >>> numbers(Path("/nowhere"), "git_info")
    []
    """
    middles = [file.name[len(stem) + 1 : -5] for file in folder.glob(f"{stem}.*.json")]
    return sorted(int(middle) for middle in middles if re.fullmatch(r"[1-9][0-9]{0,8}", middle))


def first_version(folder: Path, stem: str) -> int | None:
    """Return the version in which the program started: a number, or None for the newest."""
    return next(iter(numbers(folder, stem)), None)


def numbered(name: str, number: int | None) -> str:
    """Return the file name of a version.

    >>> numbered("project.patch", 2)
    'project.2.patch'
    """
    if number is None:
        return name
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{number}{dot}{suffix}"


def read_version(folder: Path, stem: str, number: int | None) -> dict[str, Any] | None:
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
    _write_json(folder / f"{stem}.json", info)


def archive(folder: Path, stem: str, patches: tuple[str, ...] = ()) -> None:
    """Copy the newest version and its patches to the next number, if there are not too many."""
    info = current(folder, stem)
    number = (numbers(folder, stem) or [0])[-1] + 1
    if info is None or number > KEPT:
        return
    text = json.dumps(info)
    for name in patches:
        with contextlib.suppress(FileNotFoundError):
            _copy(folder / name, folder / numbered(name, number))
        text = text.replace(f'"See {name}"', f'"See {numbered(name, number)}"')
    _write_json(folder / numbered(f"{stem}.json", number), json.loads(text))


def _copy(source: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.copyfile(source, partial)
        restrict(partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _write_json(target: Path, info: Mapping[str, Any]) -> None:
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as out:
            restrict(partial)
            json.dump(info, out, indent=2, ensure_ascii=False)
            out.write("\n")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
