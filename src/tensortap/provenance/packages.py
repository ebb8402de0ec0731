"""packages.json: which distributions are installed, and which of them the program uses.

Metadata is read by hand: parsing it as the mail header that it is takes ten times as long.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
import types
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

from tensortap.provenance.pace import Pace
from tensortap.provenance.project import PYTHON, owner_of_file
from tensortap.provenance.redact import Redactor

_HEAD = re.compile(r"^(Name|Version):[ \t]*(.*?)[ \t]*$", re.MULTILINE)


def packages_info(*, pace: Pace | None = None, redactor: Redactor | None = None) -> dict[str, Any]:
    """What packages.json holds.

    >>> packages_info()["packages"]["tensortap"]["version"]
    '...'
    """
    pace = pace or Pace(rest=0)
    redactor = redactor or Redactor()
    versions: dict[str, str] = {}
    found: dict[str, dict[str, Any]] = {}
    imported = _imported(pace)
    installed = list(_distributions(pace))
    by_name = {normalised(name) for name, _, _ in installed}
    # loaded modules whose distribution has another name: PIL, yaml, sklearn
    others = {
        module
        for module, location in imported.items()
        if normalised(module) not in by_name and owner_of_file(location) is not None
    }
    for name, version, dist in installed:
        pace()
        versions[name] = version
        modules = [m for m in imported if normalised(m) == normalised(name)]
        if not modules and others:
            modules = _modules_of(dist, others)
        direct = _direct_url(dist, redactor)
        if not modules and not direct:
            continue
        location = imported[modules[0]] if modules else str(dist.locate_file(""))
        found[name] = {"version": version, "location": location, **direct}
        if [normalised(m) for m in modules] not in ([], [normalised(name)]):
            found[name]["modules"] = modules
    return {
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "all_packages": dict(sorted(versions.items(), key=lambda item: item[0].lower())),
        "packages": dict(sorted(found.items(), key=lambda item: item[0].lower())),
    }


def normalised(name: str) -> str:
    """A distribution's name as it is compared.

    >>> normalised("Ruamel.YAML_clib")
    'ruamel-yaml-clib'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def _distributions(
    pace: Pace,
) -> Iterator[tuple[str, str, importlib.metadata.Distribution]]:
    seen = set()
    for dist in importlib.metadata.distributions():
        pace()
        try:
            text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
        except (OSError, UnicodeDecodeError):
            continue
        head = dict(_HEAD.findall(text[:4096].partition("\n\n")[0]))
        name, version = head.get("Name", ""), head.get("Version", "")
        # the first on the path is the one that is imported
        if name and normalised(name) not in seen:
            seen.add(normalised(name))
            yield name, version, dist


def _imported(pace: Pace) -> dict[str, str]:
    """Top-level modules that are loaded and not Python's own, with where they lie."""
    found = {}
    for name in list(sys.modules):
        pace()
        module = sys.modules.get(name)
        if "." in name or name == "__main__" or not issubclass(type(module), types.ModuleType):
            continue
        held = types.ModuleType.__getattribute__(module, "__dict__")
        file = held.get("__file__")
        if isinstance(file, str) and owner_of_file(file) != PYTHON:
            found[name] = os.path.dirname(file) if "__path__" in held else file
    return found


def _modules_of(dist: importlib.metadata.Distribution, wanted: set[str]) -> list[str]:
    """Which of the loaded top-level modules a distribution brought."""
    try:
        tops = (dist.read_text("top_level.txt") or "").split()
        if tops:
            return sorted(wanted.intersection(tops))
        record = "\n" + (dist.read_text("RECORD") or "")
    except (OSError, UnicodeDecodeError):
        return []
    return sorted(m for m in wanted if f"\n{m}/" in record or f"\n{m}.py," in record)


def _direct_url(dist: importlib.metadata.Distribution, redactor: Redactor) -> dict[str, Any]:
    """Where a distribution came from, if not from an index."""
    try:
        text = dist.read_text("direct_url.json")
        stated = json.loads(text) if text else None
    except (OSError, ValueError):
        stated = None
    if not isinstance(stated, dict) or not isinstance(stated.get("url"), str):
        return _develop(dist)
    url: str = stated["url"]
    found: dict[str, Any] = {"url": redactor.text(url)}
    if (stated.get("dir_info") or {}).get("editable"):
        found["editable"] = True
    if url.startswith("file:"):
        found["source"] = unquote(urlsplit(url).path)
    vcs = stated.get("vcs_info") or {}
    if vcs.get("commit_id"):
        found["vcs"] = str(vcs.get("vcs") or "git")
        found["commit_id"] = str(vcs["commit_id"])
    return found


def _develop(dist: importlib.metadata.Distribution) -> dict[str, Any]:
    """``setup.py develop``: the metadata lies beside the source, outside of site-packages."""
    path = getattr(dist, "_path", None)
    if path is None or not str(path).endswith(".egg-info"):
        return {}
    folder = os.path.dirname(str(path))
    if owner_of_file(os.path.join(folder, "x")) is not None:
        return {}
    if not os.path.exists(os.path.join(folder, "setup.py")) and os.path.basename(folder) != "src":
        return {}
    source = os.path.dirname(folder) if os.path.basename(folder) == "src" else folder
    return {"url": f"file://{source}", "editable": True, "source": source}
