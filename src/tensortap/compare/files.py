"""What a name means: a file, the folder of a run, or just text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tensortap.errors import NotFound, TensortapError
from tensortap.readers.mirror import is_url
from tensortap.runs.layout import RUN_FILE
from tensortap.runs.object_files import load_file, suffixes


def path_of(value: Any) -> Path | None:
    """The file or folder that is meant; None of anything else.

    A `Path` always is one. Text is one if something of that name exists; if it ends like the
    files that can be read; or if it has a slash and no space in it: a name that was mistyped is
    then an error, not a comparison of two texts.

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
    except OSError:  # longer than a name can be
        return None


def is_run(value: Any) -> bool:
    """Whether this is the folder of a run, a `Run`, a live session or a reader of one."""
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
    """What is in a file, its tensors mapped; anything that is no file is what it is."""
    path = path_of(value)
    if path is None:
        return value
    if path.is_dir():
        raise TensortapError(f"{path} is a folder, and not that of a run: it has no {RUN_FILE}")
    if not path.exists():
        raise NotFound(f"no such file: {path}")
    return load_file(path, trust=trust, mapped=True)


def only_tensor(value: Any, other: Any) -> Any:
    """The tensor of a file that has no other, where it meets something that is no dict."""
    if isinstance(value, dict) and len(value) == 1 and not isinstance(other, dict):
        return next(iter(value.values()))
    return value
