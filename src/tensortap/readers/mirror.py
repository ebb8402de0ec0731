"""A local copy of a run on object storage (any URL that fsspec knows), filled on demand.

Tables and provenance are copied to a temporary folder when the run is opened, payload files when
they are first read. All other code works on local files, which it can map into memory.
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
from tensortap.files import contained

_CACHED_PAYLOADS = 32  # files of 64 MiB


def is_url(where: object) -> bool:
    """Return whether this is the URL of a run.

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
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._states: dict[str, Any] = {}
        self._fetched: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Download tables and provenance that are new or have changed."""
        try:
            files = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            raise NotFound(f"no such run: {self.url}") from None
        except Exception as error:
            raise TensortapError(f"{self.url} cannot be read: {error}") from None
        # tails before sealed tables, so that a tail that is sealed meanwhile is not missed
        for path, info in sorted(files.items(), key=lambda item: not item[0].endswith(".arrows")):
            name = os.path.relpath(path, self._root)
            in_top = "/" not in name and name.endswith((".json", ".patch"))  # other files: `fetch`
            in_tables = name.startswith("records/") and not name.endswith(".part")
            state = info.get("size"), info.get("ETag") or info.get("mtime")
            if (in_top or in_tables) and self._states.get(name) != state:
                self._download(name)
                self._states[name] = state

    def fetch(self, name: str) -> None:
        """Download a file unless it is cached."""
        with self._lock:
            if not (self.folder / name).exists():
                self._download(name)
            self._fetched[name] = None
            self._fetched.move_to_end(name)
            while len(self._fetched) > _CACHED_PAYLOADS:
                old, _ = self._fetched.popitem(last=False)
                (self.folder / old).unlink(missing_ok=True)  # existing mappings stay valid

    def _download(self, name: str) -> None:
        target = contained(self.folder, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{threading.get_ident()}")
        try:
            self._fs.get_file(f"{self._root}/{name}", str(draft))
        except FileNotFoundError:
            raise NotFound(f"{self.url} has no {name}") from None
        draft.replace(target)
