"""Provenance files in a run folder: the newest under its plain name, older ones numbered.

``git_info.json`` is always the newest. When something changes, what was there becomes
``git_info.1.json``, the next one ``git_info.2.json``: the lowest number is the oldest, the state
in which the program started. Patches go by the number of the ``git_info`` that speaks of them
(``project.1.patch``). Every file is complete when it gets its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensortap.provenance.pace import Pace

KEPT = 100  # versions of a file; a program that changes its environment all the time gets no more


def current(folder: Path, stem: str) -> dict[str, Any] | None:
    """The newest version of a file, or None: there is none that can be read."""
    return _read(folder / f"{stem}.json")


def numbers(folder: Path, stem: str) -> list[int]:
    """The numbers of the older versions, oldest first.

    >>> numbers(Path("/nowhere"), "git_info")
    []
    """
    found = []
    for file in folder.glob(f"{stem}.*.json"):
        middle = file.name[len(stem) + 1 : -len(".json")]
        if middle.isdigit():
            found.append(int(middle))
    return sorted(found)


def numbered(name: str, number: int | None) -> str:
    """The name of an older version.

    >>> numbered("project.patch", 2)
    'project.2.patch'
    """
    if number is None:
        return name
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{number}{dot}{suffix}"


def read_version(folder: Path, stem: str, number: int | None) -> dict[str, Any] | None:
    """One version of a file: None is the newest."""
    return _read(folder / numbered(f"{stem}.json", number))


def first_version(folder: Path, stem: str) -> int | None:
    """The version in which the program started: a number, or None for the newest."""
    known = numbers(folder, stem)
    return known[0] if known else None


def write(folder: Path, stem: str, info: Mapping[str, Any], *, pace: Pace, keep: bool) -> None:
    """Make ``info`` the newest version; ``keep`` the one before it, unless it is one too many."""
    if keep:
        archive(folder, stem)
    _write_json(folder / f"{stem}.json", info, pace)


def archive(folder: Path, stem: str, patches: tuple[str, ...] = ()) -> int | None:
    """Copy the newest version, with its patches, to the next number."""
    info = current(folder, stem)
    known = numbers(folder, stem)
    number = known[-1] + 1 if known else 1
    if info is None or number > KEPT:
        return None
    for name in patches:
        with contextlib.suppress(FileNotFoundError):
            _copy(folder / name, folder / numbered(name, number))
    text = json.dumps(info)
    for name in patches:
        text = text.replace(f'"See {name}"', f'"See {numbered(name, number)}"')
    _write_json(folder / numbered(f"{stem}.json", number), json.loads(text), Pace(rest=0))
    return number


def put(source: Path, target: Path) -> None:
    """Move a file that is complete to its name; on the same file system at once."""
    os.replace(source, target)


def _copy(source: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.copyfile(source, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _write_json(target: Path, info: Mapping[str, Any], pace: Pace) -> None:
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as out:
            for piece in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(info):
                out.write(piece)
                pace()
            out.write("\n")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
