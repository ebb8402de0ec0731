"""A run on object storage (any URL that fsspec knows), fetched as far as it is needed.

Tables and provenance are copied to a temporary folder when the run is opened, payloads when
they are first read; so everything else reads files, mapped into memory, and knows of no URL.
"""

from __future__ import annotations

import collections
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

from tensortap.errors import MissingExtra, NotFound, TensortapError

_PAYLOADS = 32  # files that are kept at a time: 64 MiB each, as the store writes them


def is_url(where: object) -> bool:
    """Whether this names something on a storage that is no file system.

    >>> is_url("s3://bucket/runs/a"), is_url("runs/a")
    (True, False)
    """
    return isinstance(where, str) and "://" in where


class Mirror:
    """The local copy of a run."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise MissingExtra(f"{url} needs fsspec: pip install 'tensortap[s3]'") from None
        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise TensortapError(f"{url} cannot be opened: {error}") from None
        self.folder = Path(tempfile.mkdtemp(prefix="tensortap-"))
        self._end = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._sizes: dict[str, Any] = {}
        self._fetched: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Take in tables that are new or have grown."""
        try:
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            raise NotFound(f"no such run: {self.url}") from None
        except Exception as error:
            raise TensortapError(f"{self.url} cannot be read: {error}") from None
        # the open end before the sealed tables: what is sealed meanwhile is then seen once
        for path, info in sorted(found.items(), key=lambda item: not item[0].endswith(".arrows")):
            name = os.path.relpath(path, self._root)
            at_once = name.startswith("records/") or "/" not in name
            state = info.get("size"), info.get("ETag") or info.get("mtime")
            if not at_once or name.endswith(".part") or self._sizes.get(name) == state:
                continue
            if "/" not in name and not name.endswith((".json", ".patch")):
                continue  # what was dumped comes when it is asked for
            self._copy(name)
            self._sizes[name] = state

    def fetch(self, name: str) -> None:
        """Bring a file here, unless it is."""
        with self._lock:
            if not (self.folder / name).exists():
                self._copy(name)
            self._fetched[name] = None
            self._fetched.move_to_end(name)
            while len(self._fetched) > _PAYLOADS:
                old, _ = self._fetched.popitem(last=False)
                (self.folder / old).unlink(missing_ok=True)  # who has it mapped keeps it

    def _copy(self, name: str) -> None:
        target = self.folder / name
        if not target.resolve().is_relative_to(self.folder.resolve()):
            raise TensortapError(f"{self.url} has a file outside of it: {name!r}")
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{threading.get_ident()}")
        try:
            self._fs.get_file(f"{self._root}/{name}", str(draft))
        except FileNotFoundError:
            raise NotFound(f"{self.url} has no {name}") from None
        draft.replace(target)
