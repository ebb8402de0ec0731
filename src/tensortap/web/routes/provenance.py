"""The tab Provenance."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec

from tensortap.readers.run import RunReader
from tensortap.runs import layout
from tensortap.web.catalog import resolve_inside
from tensortap.web.responses import PageRequest
from tensortap.web.routes.receipt import clients

_MAX_PATCHES = 20
_PATCH_CHARACTERS = 400_000


def provenance(request: PageRequest) -> dict[str, Any]:
    """Return what ran, what was modified, and how to reproduce it."""
    reader = request.entry.reader()
    if not isinstance(reader, RunReader):
        return {"live": True, "clients": clients(request.entry)}
    folder = reader.path
    runtime, packages, git = (
        _read(folder, name) for name in ("runtime_info.json", "packages.json", "git_info.json")
    )
    return {
        "live": False,
        "run": msgspec.to_builtins(reader.info),
        "folder": str(folder),
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
        "packages_git": git.get("packages_git_info") or {},
        "modifications": git.get("runtime_modifications") or {},
        "patches": _patches(folder),
        "changed_files": sorted(path.name for path in folder.glob("*.[0-9].json")),
        "reproduce": f"tensortap reproduce {shlex.quote(str(folder))}",
    }


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    content = layout.read_json(resolve_inside(path, folder)) if path.exists() else None
    return content if isinstance(content, dict) else {}


def _patches(folder: Path) -> list[dict[str, Any]]:
    patches = []
    for path in sorted(folder.glob("*.patch"))[:_MAX_PATCHES]:
        text = resolve_inside(path, folder).read_text(encoding="utf-8", errors="replace")
        patches.append({"name": path.name, "size": len(text), "text": text[:_PATCH_CHARACTERS]})
    return patches
