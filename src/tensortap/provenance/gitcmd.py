"""Asking git without leaving a trace: no lock, no hook, no prompt, no foreign program."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

TIMEOUT = 30.0  # seconds a command may take; a network file system can be slow

# Where git looks is ours to say, not that of a hook or a rebase that started the program.
_NOT_INHERITED = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_GRAFT_FILE",
    "GIT_SHALLOW_FILE", "GIT_IMPLICIT_WORK_TREE", "GIT_REPLACE_REF_BASE", "GIT_EXTERNAL_DIFF",
    "GIT_DIFF_OPTS", "GIT_PAGER", "GIT_EDITOR", "GIT_CONFIG", "GIT_LITERAL_PATHSPECS",
    "GIT_GLOB_PATHSPECS", "GIT_NOGLOB_PATHSPECS", "GIT_ICASE_PATHSPECS",
)  # fmt: skip
_SETTINGS = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.quotePath": "true",
    "core.splitIndex": "false",
    "core.untrackedCache": "false",
    "core.safecrlf": "false",
    "core.pager": "cat",
    "diff.autoRefreshIndex": "false",  # it would write the index, optional locks or not
    "diff.suppressBlankEmpty": "false",
    "diff.orderFile": os.devnull,
    "log.showSignature": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "color.ui": "false",
    "advice.detachedHead": "false",
}


class GitFailed(Exception):
    """git is missing, took too long, or said no."""


class Git:
    """git in one folder.

    >>> Git(Path(".")).text("--version").split()[:2]
    ['git', 'version']
    """

    def __init__(self, folder: Path, *, timeout: float = TIMEOUT) -> None:
        self.folder = folder
        self.timeout = timeout

    def run(
        self,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        stdout: IO[bytes] | None = None,
        timeout: float | None = None,
        okay: Sequence[int] = (0,),
    ) -> bytes:
        """What a command writes; `GitFailed` with what it complained about."""
        program = shutil.which("git")
        if program is None:
            raise GitFailed("git is not installed")
        command = [program, "--no-pager", "--no-optional-locks", "--literal-pathspecs"]
        for name, value in _SETTINGS.items():
            command += ["-c", f"{name}={value}"]
        timeout = self.timeout if timeout is None else timeout
        try:
            done = subprocess.run(
                [*command, *arguments],
                cwd=self.folder,
                env={**_environ(), **(environ or {})},
                input=stdin,
                stdout=stdout if stdout is not None else subprocess.PIPE,
                stderr=subprocess.PIPE,
                timeout=timeout,
                check=False,
                start_new_session=True,  # Ctrl-C is for the training program
            )
        except subprocess.TimeoutExpired:
            raise GitFailed(f"git {arguments[0]} took longer than {timeout:g} s") from None
        except OSError as error:
            raise GitFailed(f"git could not be run: {error}") from error
        if done.returncode not in okay:
            said = done.stderr.decode("utf-8", "replace").strip() or f"status {done.returncode}"
            raise GitFailed(f"git {arguments[0]}: {said}")
        return done.stdout or b""

    def text(self, *arguments: str, timeout: float | None = None) -> str:
        """What a command writes, without the last newline."""
        out = self.run(*arguments, timeout=timeout).decode("utf-8", "surrogateescape")
        return out[:-1] if out.endswith("\n") else out

    def ask(self, *arguments: str) -> str:
        """What a command writes, or "" where git has no answer."""
        try:
            return self.text(*arguments)
        except GitFailed:
            return ""


def _environ() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith("GIT_TRACE")
    }
    return {
        **kept,
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "LC_ALL": "C",
    }
