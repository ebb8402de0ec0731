"""Compare the environments of two runs: packages, variables, code, command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensortap.rooms.report.run_report import read_patch, value_at
from tensortap.runs.layout import RUN_FILE, read_json

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
    runtime, packages, git = (
        [_read(path, f"{name}.json") for path in (a, b)]
        for name in ("runtime_info", "packages", "git_info")
    )
    patches = [read_patch(path) for path in (a, b)]
    variables = (_relevant(each.get("environment_variables")) for each in runtime)
    configs = (_flat(_read(path, RUN_FILE).get("config")) for path in (a, b))
    pairs: dict[str, Any] = {
        "config": _changed(*configs),  # first: it is what people change between two runs
        "command": [value_at(each, "command", "argv") for each in runtime],
        "python": [each.get("python") for each in runtime],
        "host": [each.get("host") for each in runtime],
        "environment": _changed(*variables),
        "packages": _changed(*(each.get("all_packages") or {} for each in packages)),
        "commit": [value_at(each, "project_git_info", "commit_id") for each in git],
        "branch": [value_at(each, "project_git_info", "branch") for each in git],
    }
    found = {name: (one, other) for name, (one, other) in pairs.items() if one != other}
    if patches[0] != patches[1]:
        found["patch"] = _files_of(patches[0]), _files_of(patches[1])
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


def _read(path: Path, name: str) -> dict[str, Any]:
    content = read_json(path, name)
    return content if isinstance(content, dict) else {}


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested config as one dict.

    >>> _flat({"lr": 0.1, "optimizer": {"name": "adam"}})
    {'lr': 0.1, 'optimizer.name': 'adam'}
    """
    found: dict[str, Any] = {}
    for key, value in config.items() if isinstance(config, dict) else ():
        found |= (
            _flat(value, f"{prefix}{key}.")
            if value and isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return found


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
