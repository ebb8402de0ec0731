"""Pages as one file: what reports of all kinds share."""

from __future__ import annotations

import importlib.resources
import json
import os
from pathlib import Path
from typing import Any


def static(package: str, name: str) -> str:
    """A file that lies beside the modules of a package, as text."""
    folder = importlib.resources.files(package) / "static"
    return (folder / name).read_text(encoding="utf-8")


def as_data(content: Any) -> str:
    """Content as JSON for a ``<script type="application/json">``.

    >>> as_data({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    data = json.dumps(content, allow_nan=False, separators=(",", ":"))
    # nothing that a name says ends the element it lies in
    for mark in "<>&\u2028\u2029":
        data = data.replace(mark, f"\\u{ord(mark):04x}")
    return data


def write_page(path: str | Path, page: str) -> Path:
    """Write a page whole or not at all: whoever looks meanwhile sees the old one."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path
