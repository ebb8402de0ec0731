"""packages.json: which distributions are installed, and which of them the program uses.

Metadata is searched for name and version only: parsing all of it takes ten times as long. A package
whose module has another name (PIL, yaml) has its version only. Packages installed with ``setup.py
develop``, which has no ``direct_url.json``, count as installed normally.
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
from importlib.metadata import Distribution
from typing import Any
from urllib.parse import unquote, urlsplit

from tensortap.rooms.provenance.project import PYTHON, owner_of_file
from tensortap.rooms.provenance.redact import Redactor

_HEAD = re.compile(r"^(Name|Version):[ \t]*(.*?)[ \t]*$", re.MULTILINE)


def packages_info() -> dict[str, Any]:
    """Return the content of packages.json.

    >>> packages_info()["packages"]["tensortap"]["version"]
    '...'
    """
    redactor = Redactor()
    imported = _imported()
    installed = list(_distributions())
    used: dict[str, dict[str, Any]] = {}
    for name, version, dist in installed:
        location = imported.get(normalized(name))
        origin = _origin(dist, redactor)
        if location or origin:
            location = location or str(dist.locate_file(""))
            used[name] = {"version": version, "location": location, **origin}
    versions = {name: version for name, version, _ in installed}
    return {
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "all_packages": dict(sorted(versions.items(), key=lambda item: item[0].lower())),
        "packages": dict(sorted(used.items(), key=lambda item: item[0].lower())),
    }


def normalized(name: str) -> str:
    """Return the name of a distribution in the form in which names are compared.

    >>> normalized("Ruamel.YAML_clib")
    'ruamel-yaml-clib'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def _distributions() -> Iterator[tuple[str, str, Distribution]]:
    seen = set()
    for dist in importlib.metadata.distributions():
        text = _read(dist, "METADATA") or _read(dist, "PKG-INFO")
        head = dict(_HEAD.findall(text[:4096].partition("\n\n")[0]))
        name, version = head.get("Name", ""), head.get("Version", "")
        # the first on the path is the one that is imported
        if name and normalized(name) not in seen:
            seen.add(normalized(name))
            yield name, version, dist


def _read(dist: Distribution, file: str) -> str:
    try:
        return dist.read_text(file) or ""
    except (OSError, UnicodeDecodeError):
        return ""


def _imported() -> dict[str, str]:
    """Return where the loaded top-level modules are, except Python's own, by normalized name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if "." in name or name == "__main__" or not issubclass(type(module), types.ModuleType):
            continue
        content = object.__getattribute__(module, "__dict__")
        file = content.get("__file__")
        if isinstance(file, str) and owner_of_file(file) != PYTHON:
            found[normalized(name)] = os.path.dirname(file) if "__path__" in content else file
    return found


def _origin(dist: Distribution, redactor: Redactor) -> dict[str, Any]:
    """Return where a distribution came from, if not from an index."""
    try:
        stated = json.loads(_read(dist, "direct_url.json") or "null")
    except ValueError:
        return {}
    if not isinstance(stated, dict) or not isinstance(stated.get("url"), str):
        return {}
    url: str = stated["url"]
    origin: dict[str, Any] = {"url": redactor.text(url)}
    if (stated.get("dir_info") or {}).get("editable"):
        origin["editable"] = True
    if url.startswith("file:"):
        origin["source"] = unquote(urlsplit(url).path)
    vcs = stated.get("vcs_info") or {}
    if vcs.get("commit_id"):
        origin["vcs"] = str(vcs.get("vcs") or "git")
        origin["commit_id"] = str(vcs["commit_id"])
    return origin
