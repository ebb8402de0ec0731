"""The route for the tab Provenance."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec

from tensortap.core.files import CorruptFile, read_small
from tensortap.page.responses import PageRequest, PageRoute
from tensortap.runs import layout
from tensortap.runs.run_reader import RunReader


def provenance(request: PageRequest) -> dict[str, Any]:
    """Return what ran, what was modified, and how to reproduce it."""
    reader = request.entry.reader()
    if not isinstance(reader, RunReader):
        return {"live": True}
    folder = reader.path
    runtime, packages, git = (
        _read(folder, name) for name in ("runtime_info.json", "packages.json", "git_info.json")
    )
    return {
        "live": False,
        "run": msgspec.to_builtins(reader.info),
        "command": runtime.get("command") or {},
        "working_directory": runtime.get("working_directory"),
        "host": runtime.get("host"),
        "python": runtime.get("python") or packages.get("python_version"),
        "platform": packages.get("platform"),
        "devices": runtime.get("device_names") or [],
        "seeds": runtime.get("seeds") or {},
        "environment": runtime.get("environment_variables") or {},
        "packages": packages.get("all_packages") or {},
        "git": git.get("project_git_info") or {},
        "modifications": git.get("runtime_modifications") or {},
        "patches": _patches(folder),
        "changed_files": sorted(path.name for path in folder.glob("*.[0-9].json")),
        "reproduce": f"tensortap reproduce {shlex.quote(str(folder))}",
    }


def _read(folder: Path, name: str) -> dict[str, Any]:
    content = layout.read_json(folder, name)
    return content if isinstance(content, dict) else {}


def _patches(folder: Path) -> list[dict[str, Any]]:
    patches = []
    for path in sorted(folder.glob("*.patch"))[:20]:
        try:
            text = read_small(folder, path.name, 64 << 20).decode("utf-8", "replace")
        except (OSError, CorruptFile) as error:
            text = str(error)
        patches.append({"name": path.name, "size": len(text), "text": text[:400_000]})
    return patches


ROUTES = (PageRoute("provenance", provenance),)
