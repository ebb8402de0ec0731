"""Compare the environments of two runs: packages, variables, code, command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensortap.core.files import CorruptFile, read_small
from tensortap.runs.layout import read_json

# differ in every shell, login or job, and are never the reason
_IGNORED = (
    "PWD", "OLDPWD", "SHLVL", "TENSORTAP_", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID",
    "MASTER_PORT", "SSH_", "XDG_SESSION_ID", "TMUX", "WINDOWID", "TERM_SESSION_ID",
)  # fmt: skip


def provenance_diff(a: Path | None, b: Path | None) -> dict[str, Any]:
    """Return what differs around two runs, each as a pair.

    >>> provenance_diff(None, None)
    {}
    """
    if a is None or b is None:
        return {}
    found: dict[str, Any] = {}
    one, other = (_read(path, "runtime_info.json") for path in (a, b))
    _put(found, "command", _at(one, "command", "argv"), _at(other, "command", "argv"))
    _put(found, "python", _at(one, "python"), _at(other, "python"))
    _put(found, "host", _at(one, "host"), _at(other, "host"))
    _put(found, "environment", *_changed(
        _relevant(one.get("environment_variables")), _relevant(other.get("environment_variables"))
    ))  # fmt: skip
    packages = [_read(path, "packages.json").get("all_packages") or {} for path in (a, b)]
    _put(found, "packages", *_changed(*packages))
    for name, keys in (("commit", ("commit_id",)), ("branch", ("branch",))):
        pair = [_at(_read(path, "git_info.json"), "project_git_info", *keys) for path in (a, b)]
        _put(found, name, *pair)
    patches = [_patch(path) for path in (a, b)]
    if patches[0] != patches[1]:
        found["patch"] = tuple(_files_of(patch) for patch in patches)
    return found


def rows_of(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return one row per difference: what, its value in the first run, in the second.

    >>> rows_of({"commit": ("1f3a", "9b0c"), "packages": ({"torch": "2.1"}, {"torch": None})})
    [('commit', '1f3a', '9b0c'), ('package torch', '2.1', '-')]
    """
    rows = []
    for name, (a, b) in found.items():
        if isinstance(a, dict) and isinstance(b, dict):
            one = {"packages": "package ", "environment": "$"}.get(name, f"{name} ")
            rows += [(f"{one}{key}", _said(a.get(key)), _said(b.get(key))) for key in {**a, **b}]
        else:
            rows.append((name, _said(a), _said(b)))
    return rows


def _said(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return str(value)


def _put(found: dict[str, Any], name: str, a: Any, b: Any) -> None:
    if a != b:
        found[name] = (a, b)


def _read(path: Path, name: str) -> dict[str, Any]:
    content = read_json(path, name)
    return content if isinstance(content, dict) else {}


def _patch(run: Path) -> str:
    try:
        return read_small(run, "project.patch", 64 << 20).decode("utf-8", "replace")
    except (OSError, CorruptFile):
        return ""


def _at(content: Any, *keys: str) -> Any:
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _relevant(variables: Any) -> dict[str, Any]:
    if not isinstance(variables, dict):
        return {}
    return {k: v for k, v in variables.items() if k != "_" and not k.startswith(_IGNORED)}


def _changed(a: dict[str, Any], b: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both without their common entries."""
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return {n: a.get(n) for n in names}, {n: b.get(n) for n in names}


def _files_of(patch: str) -> list[str]:
    return [
        line.split(" b/", 1)[-1] for line in patch.splitlines() if line.startswith("diff --git")
    ]
