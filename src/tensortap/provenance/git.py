"""git_info.json: which commit ran, with which changes, and where it can be fetched from.

``project_git_info`` always has the same keys; where there is no repository they are empty and
``status`` says why: "clean", "dirty", "bare", "not a repository" or "unknown" (with ``error``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensortap.limits import format_size
from tensortap.provenance.gitcmd import TIMEOUT, Git, GitFailed
from tensortap.provenance.pace import Pace
from tensortap.provenance.patch import UNTRACKED_LIMIT, write_patch
from tensortap.provenance.project import project_folder
from tensortap.provenance.redact import Redactor, looks_secret

LOG_ENTRIES = 50
PATCH = "project.patch"
LOOKED_AT = 4 << 20  # bytes of added lines in which credentials are looked for
LONGEST_LINE = 4096


@dataclass(slots=True)
class GitInfo:
    """What goes into git_info.json, and the patch files that it speaks of."""

    info: dict[str, Any]
    patches: dict[str, Path] = field(default_factory=dict)  # name in the run folder → file


def collect_git(
    scratch: Path,
    *,
    start: Path | None = None,
    packages: dict[str, dict[str, Any]] | None = None,
    skip: tuple[Path, ...] = (),
    limit: int = UNTRACKED_LIMIT,
    timeout: float = TIMEOUT,
    redactor: Redactor | None = None,
    pace: Pace | None = None,
) -> GitInfo:
    """git_info.json without the runtime modifications; patches are written into ``scratch``.

    ``start`` is a folder of the project (else that of the main script), ``packages`` is the
    "packages" of packages.json, ``skip`` are folders whose files belong into no patch.
    """
    redactor = redactor or Redactor()
    found = GitInfo({})

    def look(folder: Path, patch: str) -> dict[str, Any]:
        info = repository_info(
            folder, scratch / patch, skip=skip, limit=limit, timeout=timeout, redactor=redactor,
            pace=pace,
        )  # fmt: skip
        if info["git_diff"]:
            found.patches[patch] = scratch / patch
        return info

    project = look(start or project_folder(), PATCH)
    for path, commit in _submodules(project, timeout):
        info = look(Path(project["repository"]) / path, f"submodule.{_slug(path)}.patch")
        project.setdefault("submodules", {})[path] = {
            "committed_id": commit,
            **{key: info[key] for key in _SHORT if key in info},
        }
        if info["status"] == "dirty":
            project["status"] = "dirty"
    found.info["project_git_info"] = project
    found.info["packages_git_info"] = editable = {}
    for name, package in sorted((packages or {}).items()):
        location = package.get("source") if package.get("editable") else None
        if not location or not os.path.isdir(location):
            continue
        top = Git(Path(location), timeout=timeout).ask("rev-parse", "--show-toplevel")
        if not top:
            continue
        if top == project["repository"]:
            editable[name] = {
                "location": location, "same_as": "project",
                **{key: project[key] for key in ("commit_id", "branch", "status")},
            }  # fmt: skip
            continue
        info = look(Path(location), f"package.{_slug(name)}.patch")
        editable[name] = {"location": location, **{k: info[k] for k in _SHORT if k in info}}
    return found


_SHORT = (
    "commit_id", "branch", "status", "remote", "repository", "git_dir", "git_diff",
    "patch_sha256", "error", "warnings",
)  # fmt: skip


def repository_info(
    folder: Path,
    patch: Path,
    *,
    skip: tuple[Path, ...] = (),
    limit: int = UNTRACKED_LIMIT,
    timeout: float = TIMEOUT,
    redactor: Redactor | None = None,
    pace: Pace | None = None,
) -> dict[str, Any]:
    """All about the repository that a folder lies in; its changes go into ``patch``.

    There is a file only where there are changes.
    """
    redactor = redactor or Redactor()
    info: dict[str, Any] = {
        "commit_id": "", "branch": "", "status": "unknown", "git_log": [], "log_entries_count": 0,
        "git_diff": "", "remote": "", "repository": "", "git_dir": "",
    }  # fmt: skip
    git = Git(folder, timeout=timeout)
    try:
        common = git.text("rev-parse", "--git-common-dir")
        info["git_dir"] = str((folder / common).resolve())
        inside = git.text("rev-parse", "--is-inside-work-tree") == "true"
    except GitFailed as error:
        refused = "not a git repository" not in str(error)
        info["status"] = "unknown" if refused else "not a repository"
        info["error"] = redactor.text(str(error)) if refused else f"no git repository at {folder}"
        return info
    info["commit_id"] = git.ask("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    # without a symbolic name the head is detached
    info["branch"] = git.ask("symbolic-ref", "--short", "--quiet", "HEAD") or "(detached)"
    info["remote"] = redactor.text(_remote(git))
    if info["commit_id"]:
        info["git_log"] = _log(git, redactor)
    info["log_entries_count"] = len(info["git_log"])
    if not inside:
        info["status"] = "bare"
        return info
    try:
        info["repository"] = git.text("rev-parse", "--show-toplevel")
        _changes(info, patch, skip, limit, timeout, pace or Pace(rest=0))
    except (GitFailed, OSError) as error:
        patch.unlink(missing_ok=True)
        info["error"] = f"the changes could not be kept: {redactor.text(str(error))}"
    return info


def _changes(
    info: dict[str, Any],
    patch: Path,
    skip: tuple[Path, ...],
    limit: int,
    timeout: float,
    pace: Pace,
) -> None:
    git = Git(Path(info["repository"]), timeout=timeout)
    # before the first commit everything is a change to the empty tree
    base = info["commit_id"] or git.run("hash-object", "-t", "tree", "--stdin").decode().strip()
    untracked = write_patch(git, base, patch, limit=limit, skip=skip)
    if patch.stat().st_size:
        info["git_diff"] = f"See {patch.name}"
        info["patch_sha256"] = _digest(patch)
        if _adds_secret(patch, pace):
            info["warnings"] = [f"{patch.name} holds something that looks like a credential"]
    else:
        patch.unlink()
    dirty = info["git_diff"] or untracked.left_out_count
    info["status"] = "dirty" if dirty else "clean"
    info["untracked"] = {
        "included": len(untracked.included),
        "limit": format_size(limit),
        "left_out": untracked.left_out,
        "left_out_count": untracked.left_out_count,
        "files_of_runs_left_out": untracked.in_runs > 0,
    }


def _digest(patch: Path) -> str:
    digest = hashlib.sha256()
    with patch.open("rb") as data:
        while piece := data.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _adds_secret(patch: Path, pace: Pace) -> bool:
    """Whether a patch adds a line with what looks like a credential."""
    pace.resume()  # git has just been waited for
    binary = False
    seen = 0
    with patch.open("rb") as lines:
        for line in lines:
            pace()
            if line.startswith(b"diff --git "):
                binary = False
            elif line.startswith(b"GIT binary patch"):
                binary = True
            elif not binary and line.startswith(b"+"):
                if looks_secret(line[:LONGEST_LINE]):
                    return True
                seen += len(line)
                if seen > LOOKED_AT:
                    return False
    return False


def _log(git: Git, redactor: Redactor) -> list[dict[str, str]]:
    try:
        out = git.run(
            "log", f"-{LOG_ENTRIES}", "-z", "--no-color", "--no-decorate", "--no-ext-diff",
            "--no-patch", "--encoding=UTF-8", "--format=%H%x1f%an%x1f%aI%x1f%s",
        )  # fmt: skip
    except GitFailed:
        return []
    entries = []
    for line in out.decode("utf-8", "replace").split("\0"):
        commit, _, rest = line.strip("\n").partition("\x1f")
        author, _, rest = rest.partition("\x1f")
        date, _, message = rest.partition("\x1f")
        if commit:
            message = redactor.text(message)
            entries.append({"commit": commit, "author": author, "date": date, "message": message})
    return entries


def _remote(git: Git) -> str:
    """Where the branch is pushed to, else origin, else any remote."""
    branch = git.ask("symbolic-ref", "--short", "--quiet", "HEAD")
    of_branch = git.ask("config", "--get", f"branch.{branch}.remote") if branch else ""
    for name in (of_branch, "origin", *git.ask("remote").splitlines()):
        if name and name != ".":
            url = git.ask("config", "--get", f"remote.{name}.url")
            if url:
                return url
    return ""


def _submodules(info: dict[str, Any], timeout: float) -> list[tuple[str, str]]:
    """The checked out submodules, with the commit that the project wants of each."""
    if not info["repository"] or not info["commit_id"]:
        return []
    top = Path(info["repository"])
    if not (top / ".gitmodules").exists():
        return []
    git = Git(top, timeout=timeout)
    try:
        staged = git.run("ls-files", "--stage", "-z").split(b"\0")
    except GitFailed:
        return []
    found = []
    for line in staged:
        meta, _, raw = line.partition(b"\t")
        path = os.fsdecode(raw)
        if meta.startswith(b"160000") and (top / path / ".git").exists():
            found.append((path, meta.split()[1].decode()))
    return found


def _slug(path: str) -> str:
    """A path as part of a file name; two paths never give the same."""
    plain = re.sub(r"[^\w.-]", "_", path, flags=re.ASCII)
    if plain == path:
        return plain
    return f"{plain}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:6]}"


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two git_info.json say the same."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
