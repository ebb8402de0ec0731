"""The files that start a run again: requirements.txt, environment.sh and run.sh."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from tensortap.core.files import contained
from tensortap.rooms.provenance.redact import HIDDEN
from tensortap.rooms.provenance.stored import (
    StoredPackage,
    StoredPackages,
    StoredRepository,
    StoredRuntime,
    printable,
)

_TORCH_INDEX = "https://download.pytorch.org/whl/"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_SOURCE = re.compile(r"(git|hg|svn|bzr)\+(https?|ssh|git|file)://[!-~]+@[A-Za-z0-9][\w./-]*", re.A)
# variables of the shell in which it ran (a terminal, a login, a virtual environment), and those
# that launchers set for each process
_SHELL = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|TERM|TERM_\w+|COLORTERM|DISPLAY|XAUTHORITY"
    r"|WAYLAND_DISPLAY|SSH_\w+|DBUS_\w+|XDG_\w+|MAIL|LS_COLORS|LESS\w*|HOST|HOSTNAME|EDITOR|VISUAL"
    r"|PAGER|WINDOWID|TMUX\w*|STY|VIRTUAL_ENV\w*|CONDA_\w+|PYENV_\w+|PS1|TMPDIR|TEMP|TMP|LINES"
    r"|COLUMNS|INVOCATION_ID|JOURNAL_STREAM|JPY_\w+|VSCODE_\w+|PYTEST_\w+|SLURM_\w+|MANPATH"
    r"|INFOPATH|__\w+"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|TORCH_NCCL_ASYNC_ERROR_HANDLING"
)


def requirements(
    packages: StoredPackages, checkouts: Mapping[str, StoredRepository]
) -> tuple[str, list[str]]:
    """Return requirements.txt, and which packages are on no index.

    >>> requirements(StoredPackages("3.12.1", {"numpy": "2.1.0"}), {})[0]
    '# Python 3.12.1\\nnumpy==2.1.0\\n'
    """
    lines: list[str] = []
    missing: list[str] = []
    indexes: dict[str, None] = {}
    for name, version in packages.all_packages.items():
        info = packages.packages.get(name, StoredPackage())
        if not _NAME.fullmatch(name) or not _VERSION.fullmatch(version):
            lines.append(f"# {printable(name)}=={printable(version)}: not a valid requirement")
            missing.append(f"{name} {version}: not a valid requirement")
        elif name == "pip":
            lines.append(f"# pip=={version}")
        elif not info.url:
            label = version.partition("+")[2]
            if re.fullmatch(r"cpu|cu[0-9]+|rocm[0-9.]+|xpu", label):
                indexes[f"--extra-index-url {_TORCH_INDEX}{label}"] = None
            elif label:
                missing.append(f"{name} {version}: a local version, probably on no index")
            lines.append(f"{name}=={version}")
        elif info.commit_id and HIDDEN not in info.url:
            source = f"{info.vcs}+{info.url}@{info.commit_id}"
            lines.append(f"{'' if _SOURCE.fullmatch(source) else '# '}{name} @ {printable(source)}")
        else:
            origin = _checkout_origin(info, checkouts.get(name, StoredRepository()))
            lines.append(f"# {name}=={version}: {printable(origin)}")
            if not origin.endswith("part of project/"):
                missing.append(f"{name} {version}: {origin}")
    first = f"# Python {printable(packages.python_version)}"
    return "\n".join([first, *indexes, *lines, ""]), missing


def _checkout_origin(info: StoredPackage, checkout: StoredRepository) -> str:
    origin = f"{'editable' if info.editable else 'installed'} from {info.source or info.url}"
    if checkout.commit_id:
        origin += f", commit {checkout.commit_id} ({checkout.status})"
    if checkout.same_as == "project":
        origin += ", part of project/"
    return origin


class Recipe:
    """environment.sh and run.sh; paths in the old project point into the new one."""

    def __init__(self, runtime: StoredRuntime, old: str, new: Path | None) -> None:
        command = runtime.command
        self._executable = command.executable
        self._launcher = command.launcher
        self._old = old.rstrip("/")
        self._new = new
        self._variables = runtime.environment_variables
        self.missing: list[str] = []
        self.notes: list[str] = []
        try:
            words = shlex.split(command.launcher or command.full_command)
        except ValueError:  # quotes that do not match
            words = []
        self.command = self._make_command(words)
        self._folder = self._working_directory(runtime.working_directory)

    def environment(self) -> str:
        """Return environment.sh."""
        exports: list[str] = []
        hidden: list[str] = []
        shell: list[str] = []
        for name, value in self._variables.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
                continue  # functions that bash exports
            line = f"export {name}={self._relocated(value)}"
            comment = "# " + printable(line, len(line))
            if HIDDEN in value:
                hidden.append(name)
                exports.append(f"{comment.replace(shlex.quote(HIDDEN), '')}  # a secret: fill in")
            elif _SHELL.fullmatch(name):
                shell.append(comment)
            else:
                exports.append(line)
        if hidden:
            self.missing.append(
                f"secrets: fill in {', '.join(hidden)} in environment.sh, or set them in the shell"
            )
        size = self._variables.get("WORLD_SIZE", "1")
        if not self._launcher and size.isdigit() and int(size) > 1:
            self.missing.append(
                f"the launcher: the run was one of {size} processes, and what started them is "
                "not known"
            )
        lines = ["# sourced by run.sh", *exports, "", "# of the old shell and launcher", *shell]
        return "\n".join(lines) + "\n"

    def script(self, run: Path) -> str:
        """Return run.sh."""
        check = "echo 'replace *** in run.sh, then delete this line' >&2; exit 1\n"
        return (
            "#!/bin/sh\n"
            f"# runs {printable(str(run))} again; PYTHON=… chooses the interpreter\n"
            "set -e\n"
            'here=$(cd "$(dirname "$0")" && pwd)\n'
            '. "$here/environment.sh"\n'
            f"cd {self._folder}\n"
            f"{check if HIDDEN in self.command else ''}"
            f"exec {self.command}\n"
        )

    def _make_command(self, words: list[str]) -> str:
        if not words or "\0" in "".join(words):
            self.missing.append("the command: it was not recorded")
            return "true"
        shell = []
        if words[0] == self._executable or os.path.basename(words[0]).startswith("python"):
            shell.append('"${PYTHON:-python3}"')
            binaries = os.path.dirname(words[0])
            words = words[1:]
            if words and binaries and os.path.dirname(words[0]) == binaries:
                # torchrun, accelerate: scripts of the old environment
                shell.append(f'"$(command -v {shlex.quote(os.path.basename(words[0]))})"')
                words = words[1:]
        if not words:
            self.missing.append("the program: it was typed into an interactive Python")
        elif any("ipykernel" in word for word in words[:2]):
            self.missing.append("the program: it ran in a notebook")
        if any(HIDDEN in word for word in words):
            self.missing.append("secrets of the command: replace *** in run.sh")
        return " ".join([*shell, *map(self._relocated, words)])

    def _working_directory(self, old: str) -> str:
        if self._new is not None and self._inside(old):
            rest = old[len(self._old) :].strip("/")
            folder = contained(self._new, rest)
            folder.mkdir(parents=True, exist_ok=True)  # git keeps no empty folders
            return '"$here"/' + shlex.quote(os.path.join("project", rest).rstrip("/"))
        if os.path.isdir(old):
            self.notes.append(f"it runs in {old}, as it did before, not in the new folder")
        else:
            self.missing.append(f"the working directory {old}: it does not exist")
        return shlex.quote(old)

    def _inside(self, path: str) -> bool:
        return bool(self._old) and (path == self._old or path.startswith(f"{self._old}/"))

    def _relocated(self, text: str) -> str:
        """Quote a word for the shell; paths that exist in the new project point there."""
        parts = re.split(r"([:=])", text)
        for i, part in enumerate(parts):
            if self._new is not None and self._inside(part):
                moved = self._new / part[len(self._old) :].lstrip("/")
                parts[i] = str(moved) if moved.exists() else part
        return shlex.quote("".join(parts))
