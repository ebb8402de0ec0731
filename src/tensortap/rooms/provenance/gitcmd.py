"""Run git without side effects: no lock, no hook, no prompt, no external program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO

TIMEOUT = 30.0  # seconds for a command; a network file system can be slow

# a hook or a rebase that started the program must not redirect git to another repository
_INHERITED = re.compile(
    r"(?!GIT_).*|GIT_(CONFIG_(GLOBAL|SYSTEM|NOSYSTEM|COUNT|KEY_\d+|VALUE_\d+)|SSH\w*|ASKPASS"
    r"|EXEC_PATH|CEILING_DIRECTORIES|DISCOVERY_ACROSS_FILESYSTEM|SSL_\w+|PROXY_\w+)"
)
_SETTINGS = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.quotePath": "true",
    "core.splitIndex": "false",
    "core.untrackedCache": "false",
    "core.safecrlf": "false",
    "core.pager": "cat",
    "diff.autoRefreshIndex": "false",  # it would write the index even without optional locks
    "diff.suppressBlankEmpty": "false",
    "diff.orderFile": os.devnull,
    "log.showSignature": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "color.ui": "false",
    "advice.detachedHead": "false",
    "init.defaultBranch": "main",
    "init.templateDir": "",
    "submodule.recurse": "false",
}


_ISOLATED = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "0",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
}


class GitFailed(Exception):
    """git is not installed, took too long, or reported an error."""


class Git:
    """git in one folder.

    If it is `isolated`, the configuration of the user and of the machine has no effect: no filter,
    no credential helper, no rewritten address.

    >>> Git(Path(".")).text("--version").split()[:2]
    ['git', 'version']
    """

    def __init__(self, folder: Path, *, timeout: float = TIMEOUT, isolated: bool = False) -> None:
        self.folder = folder
        self.timeout = timeout
        self._isolated = isolated

    def run(
        self,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        stdout: IO[bytes] | None = None,
    ) -> bytes:
        """Return the output of a command; raise GitFailed with its error message."""
        program = shutil.which("git")
        if program is None:
            raise GitFailed("git is not installed")
        command = [program, "--no-pager", "--no-optional-locks", "--literal-pathspecs"]
        for name, value in _SETTINGS.items():
            command += ["-c", f"{name}={value}"]
        try:
            done = subprocess.run(
                [*command, *arguments],
                cwd=self.folder,
                env={**_environ(), **(_ISOLATED if self._isolated else {}), **(environ or {})},
                input=stdin,
                stdout=stdout if stdout is not None else subprocess.PIPE,
                stderr=subprocess.PIPE,
                timeout=self.timeout,
                check=False,
                start_new_session=True,  # Ctrl-C is for the training program
            )
        except subprocess.TimeoutExpired:
            raise GitFailed(f"git {arguments[0]} took longer than {self.timeout:g} s") from None
        except OSError as error:
            raise GitFailed(f"git cannot be run: {error}") from error
        if done.returncode:
            message = done.stderr.decode("utf-8", "replace").strip()
            raise GitFailed(f"git {arguments[0]}: {message or f'status {done.returncode}'}")
        return done.stdout or b""

    def text(self, *arguments: str) -> str:
        """Return the output of a command without the last newline."""
        return self.run(*arguments).decode("utf-8", "surrogateescape").removesuffix("\n")

    def ask(self, *arguments: str) -> str:
        """Return the output of a command, or "" if it fails."""
        try:
            return self.text(*arguments)
        except GitFailed:
            return ""


def _environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}
    return {
        **kept,
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "LC_ALL": "C",
    }
