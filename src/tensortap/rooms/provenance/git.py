"""git_info.json: which commit ran, with which changes, and where it can be fetched from.

``project_git_info`` always has the same keys. Where there is no repository they are empty, and
``status`` says why: "clean", "dirty", "not a repository" or "unknown" (with ``error``).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from tensortap.core.limits import format_size
from tensortap.rooms.provenance.gitcmd import TIMEOUT, Git, GitFailed
from tensortap.rooms.provenance.patch import (
    MAX_PATCH,
    UNTRACKED_LIMIT,
    Untracked,
    redact_patch,
    write_patch,
)
from tensortap.rooms.provenance.project import project_folder
from tensortap.rooms.provenance.redact import Redactor


def collect_git(
    scratch: Path,
    *,
    start: Path | None = None,
    packages: dict[str, dict[str, Any]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return git_info.json without the runtime modifications; write its patch into `scratch`.

    `start` is a folder of the project (default: that of the main script), `packages` is the
    "packages" of packages.json. `options` are those of `repository_info`.
    """
    project = repository_info(start or project_folder(), scratch / "project.patch", **options)
    editable: dict[str, Any] = {}
    for name, package in sorted((packages or {}).items()):
        location = package.get("source") if package.get("editable") else None
        git = Git(Path(location)) if location and os.path.isdir(location) else None
        if git is not None and (top := git.ask("rev-parse", "--show-toplevel")):
            dirty = bool(git.ask("status", "--porcelain", "--untracked-files=no"))
            editable[name] = {
                "location": location,
                "commit_id": git.ask("rev-parse", "--verify", "--quiet", "HEAD^{commit}"),
                "status": "dirty" if dirty else "clean",
                "same_as": "project" if top == project["repository"] else "",
            }
    return {"project_git_info": project, "packages_git_info": editable}


def repository_info(
    folder: Path,
    patch: Path,
    *,
    skip: tuple[Path, ...] = (),
    limit: int = UNTRACKED_LIMIT,
    timeout: float = TIMEOUT,
    redactor: Redactor | None = None,
) -> dict[str, Any]:
    """Describe the repository of a folder; write its changes, if there are any, into `patch`.

    `skip` are folders whose files do not belong into the patch, `limit` is the size of all
    untracked files in it.
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
    except GitFailed as error:
        if "not a git repository" in str(error):
            return {**info, "status": "not a repository", "error": f"no git repository at {folder}"}
        return {**info, "error": redactor.text(str(error))}
    info["commit_id"] = git.ask("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    branch = git.ask("symbolic-ref", "--short", "--quiet", "HEAD")
    info["branch"] = branch or "(detached)"
    remote = git.ask("ls-remote", "--get-url")  # that of the branch; "origin" if there is none
    info["remote"] = "" if remote == "origin" else redactor.text(remote)
    if info["commit_id"]:
        info["git_log"] = _log(git, redactor)
    info["log_entries_count"] = len(info["git_log"])
    try:
        info["repository"] = git.text("rev-parse", "--show-toplevel")
        git = Git(Path(info["repository"]), timeout=timeout)
        # before the first commit everything is a change to the empty tree
        base = info["commit_id"] or git.text("hash-object", "-t", "tree", "--stdin")
        untracked = write_patch(git, base, patch, limit=limit, skip=skip)
        if (size := patch.stat().st_size) > MAX_PATCH:
            info["status"] = "dirty"
            raise GitFailed(f"the patch has {format_size(size)}, the limit is 4 MiB")
        redacted = redact_patch(patch, redactor)
        info |= _changes(patch, untracked, limit)
        warnings = []
        if redacted:
            info["redacted_lines"] = redacted
            warnings.append(f"{redacted} lines of {patch.name} held credentials: ***")
        if Path(info["repository"], ".gitmodules").exists():
            warnings.append("submodules are stored as commits, without changes in them")
        if warnings:
            info["warnings"] = warnings
    except (GitFailed, OSError) as error:
        patch.unlink(missing_ok=True)
        info["error"] = f"the changes could not be saved: {redactor.text(str(error))}"
    return info


def _changes(patch: Path, untracked: Untracked, limit: int) -> dict[str, Any]:
    info: dict[str, Any] = {"git_diff": ""}
    if patch.stat().st_size:
        info["git_diff"] = f"See {patch.name}"
        # tells a new version, too
        info["patch_sha256"] = hashlib.sha256(patch.read_bytes()).hexdigest()
    else:
        patch.unlink()
    info["status"] = "dirty" if info["git_diff"] or untracked.left_out_count else "clean"
    info["untracked"] = {
        "included": len(untracked.included),
        "limit": format_size(limit),
        "left_out": untracked.left_out,
        "left_out_count": untracked.left_out_count,
        "files_of_runs_left_out": untracked.in_runs > 0,
    }
    return info


def _log(git: Git, redactor: Redactor) -> list[dict[str, str]]:
    try:
        out = git.run(
            "log", "-50", "-z", "--no-color", "--no-decorate", "--no-ext-diff",
            "--no-patch", "--encoding=UTF-8", "--format=%H%x1f%an%x1f%aI%x1f%s",
        )  # fmt: skip
    except GitFailed:
        return []
    entries = []
    for line in out.decode("utf-8", "replace").split("\0"):
        if line.strip("\n"):
            fields = line.strip("\n").split("\x1f", 3)
            entry = dict(zip(("commit", "author", "date", "message"), fields, strict=True))
            entries.append({**entry, "message": redactor.text(entry["message"])})
    return entries
