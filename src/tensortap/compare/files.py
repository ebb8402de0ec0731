"""Tell files, folders of runs and plain text apart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tensortap.errors import NotFound, TensortapError
from tensortap.readers.mirror import is_url
from tensortap.runs.layout import RUN_FILE
from tensortap.runs.object_files import load_file, suffixes


def path_of(value: Any) -> Path | None:
    """Return the file or folder that a value names; None for anything else.

    A `Path` always names one. Text does if the file exists, if it has a readable suffix, or if it
    has a slash and no space: a mistyped path should be an error, not a comparison of two texts.

    >>> path_of("weights.npy"), path_of("runs/a"), path_of("a cat")
    (PosixPath('weights.npy'), PosixPath('runs/a'), None)
    """
    if isinstance(value, os.PathLike):
        return Path(value)
    if not isinstance(value, str) or not value or "\0" in value or "\n" in value:
        return None
    named = value.endswith(tuple(suffixes())) or (os.sep in value and " " not in value)
    if named:
        return Path(value)
    try:
        return Path(value) if os.path.exists(value) else None
    except OSError:  # too long for a file name
        return None


def is_run(value: Any) -> bool:
    """Return whether a value is a run, its folder, a live session or a reader."""
    if is_url(value):
        return True
    path = path_of(value)
    if path is not None:
        return path.is_dir() and (path / RUN_FILE).exists()
    if isinstance(value, type):
        return False
    reader = getattr(value, "reader", value)
    return all(callable(getattr(reader, verb, None)) for verb in ("names", "records", "load"))


def content_of(value: Any, *, trust: bool = False) -> Any:
    """Return the content of a file, with its tensors mapped; other values as they are."""
    path = path_of(value)
    if path is None:
        return value
    if path.is_dir():
        raise TensortapError(f"{path} is a folder without {RUN_FILE}, so it is not a run")
    if not path.exists():
        raise NotFound(f"no such file: {path}")
    return load_file(path, trust=trust, mapped=True)


def only_tensor(value: Any, other: Any) -> Any:
    """Return the only tensor of a file if it is compared with something other than a dict."""
    if isinstance(value, dict) and len(value) == 1 and not isinstance(other, dict):
        return next(iter(value.values()))
    return value
