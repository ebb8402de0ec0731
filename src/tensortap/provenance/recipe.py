"""The files that start a run again: requirements.txt, environment.sh and run.sh."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

from tensortap.provenance.redact import HIDDEN
from tensortap.provenance.runtime import LAUNCHED

_TORCH_INDEX = "https://download.pytorch.org/whl/"
# Variables of the session in which it ran: a terminal, a login, a virtual environment.
_SESSION = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|TERM|TERM_\w+|COLORTERM|DISPLAY|XAUTHORITY"
    r"|WAYLAND_DISPLAY|SSH_\w+|DBUS_\w+|XDG_\w+|MAIL|LS_COLORS|LESS\w*|HOST|HOSTNAME|EDITOR|VISUAL"
    r"|PAGER|WINDOWID|TMUX\w*|STY|VIRTUAL_ENV\w*|CONDA_\w+|PYENV_\w+|PS1|TMPDIR|TEMP|TMP|LINES"
    r"|COLUMNS|INVOCATION_ID|JOURNAL_STREAM|JPY_\w+|VSCODE_\w+|PYTEST_\w+|SLURM_\w+|MANPATH"
    r"|INFOPATH|__\w+"
)


def requirements(packages: dict[str, Any], checkouts: dict[str, Any]) -> tuple[str, list[str]]:
    """requirements.txt, and what of it no index has.

    >>> requirements({"all_packages": {"numpy": "2.1.0"}, "python_version": "3.12.1"}, {})[0]
    '# Python 3.12.1\\nnumpy==2.1.0\\n'
    """
    details: dict[str, dict[str, Any]] = packages.get("packages") or {}
    lines, missing, indexes = [], [], []
    for name, version in (packages.get("all_packages") or {}).items():
        info = details.get(name, {})
        if name == "pip":
            lines.append(f"# pip=={version}")
            continue
        if not info.get("url"):
            label = str(version).partition("+")[2]
            if label and re.fullmatch(r"cpu|cu\d+|rocm[\d.]+|xpu", label):
                if label not in indexes:
                    indexes.append(label)
            elif label:
                missing.append(f"{name} {version}: a local version, probably on no index")
            lines.append(f"{name}=={version}")
        elif info.get("commit_id") and HIDDEN not in info["url"]:
            lines.append(f"{name} @ {info.get('vcs', 'git')}+{info['url']}@{info['commit_id']}")
        else:
            kind = "editable" if info.get("editable") else "installed"
            origin = f"{kind} from {info.get('source') or info['url']}"
            checkout = checkouts.get(name) or {}
            if checkout.get("commit_id"):
                origin += f", commit {checkout['commit_id']} ({checkout.get('status')})"
            if checkout.get("remote"):
                origin += f", remote {checkout['remote']}"
            if checkout.get("same_as") == "project":
                origin += ", part of project/"
            else:
                missing.append(f"{name} {version}: {origin}")
            lines.append(f"# {name}=={version}: {origin}")
    head = [f"# Python {packages.get('python_version')}"]
    head += [f"--extra-index-url {_TORCH_INDEX}{label}" for label in indexes]
    return "\n".join([*head, *lines]) + "\n", missing


class Recipe:
    """environment.sh and run.sh, with paths of the old project pointing into the new one."""

    def __init__(self, runtime: dict[str, Any], old: str, new: Path | None) -> None:
        self._runtime = runtime
        self._old = old.rstrip("/")
        self._new = new
        self._variables: dict[str, str] = dict(runtime.get("environment_variables") or {})
        self._secrets: list[str] = []  # what the secrets of the command were for
        self.missing: list[str] = []
        self.notes: list[str] = []
        command = runtime.get("command") or {}
        self._launcher = str(command.get("launcher") or "")
        self._words = shlex.split(self._launcher or str(command.get("full_command") or ""))
        self._command = self._make_command()
        self._folder = self._working_directory()

    def environment(self) -> str:
        """environment.sh"""
        exports: list[str] = []
        hidden: list[str] = []
        session: list[str] = []
        launched: list[str] = []
        for name, value in self._variables.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                continue  # functions that bash exports
            line = f"export {name}={self._relocated(value)}"
            shown = line.replace("\n", " ")
            if HIDDEN in value:
                hidden.append(name)
                exports.append(f"# {shown.replace(shlex.quote(HIDDEN), '')}  # a secret: fill in")
            elif name in LAUNCHED:
                launched.append(f"# {shown}")
            elif _SESSION.fullmatch(name):
                session.append(f"# {shown}")
            else:
                exports.append(line)
        if hidden:
            self.missing.append(
                f"secrets, to be filled in in environment.sh: {', '.join(hidden)} "
                "(or set in the shell that runs it)"
            )
        if launched and not self._launcher and self._world_size() > 1:
            self.missing.append(
                f"the launcher: it ran as one of {self._world_size()} processes, and what "
                "started them is not known"
            )
        lines = ["# sourced by run.sh", *exports]
        for number, what in enumerate(self._secrets, 1):
            lines.append(f"# export TENSORTAP_SECRET_{number}=  # {what}: fill in")
        if launched:
            lines += ["", "# set by the launcher, for each process", *launched]
        if session:
            lines += ["", "# of the session in which it ran", *session]
        return "\n".join(lines) + "\n"

    def script(self, run: Path) -> str:
        """run.sh"""
        origin = str(run).replace("\n", " ")
        return (
            "#!/bin/sh\n"
            f"# {origin}, once more; PYTHON=… chooses the interpreter\n"
            "set -e\n"
            'here=$(cd "$(dirname "$0")" && pwd)\n'
            '. "$here/environment.sh"\n'
            f"cd {self._folder}\n"
            f"exec {self._command}\n"
        )

    def _world_size(self) -> int:
        size = self._variables.get("WORLD_SIZE", "1")
        return int(size) if size.isdigit() else 1

    def _make_command(self) -> str:
        if not self._words:
            self.missing.append("the command: it was not recorded")
            return "true"
        words = list(self._words)
        executable = str((self._runtime.get("command") or {}).get("executable") or "")
        shell = []
        if words[0] == executable or os.path.basename(words[0]).startswith("python"):
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
        before = ""
        for word in words:
            shell.append(self._argument(word, before))
            before = word
        return " ".join(shell)

    def _argument(self, word: str, before: str) -> str:
        if HIDDEN not in word:
            return self._relocated(word)
        parts = word.split(HIDDEN)
        what = word.partition("=")[0] if "=" in word else before
        quoted = shlex.quote(parts[0]) if parts[0] else ""
        for part in parts[1:]:
            self._secrets.append(what)
            name = f"TENSORTAP_SECRET_{len(self._secrets)}"
            quoted += f'"${{{name}:?fill it in in environment.sh}}"'
            quoted += shlex.quote(part) if part else ""
        self.missing.append(f"a secret of the command, the value of {what}")
        return quoted

    def _working_directory(self) -> str:
        old = str(self._runtime.get("working_directory") or "")
        if self._new is not None and self._inside(old):
            rest = old[len(self._old) :].strip("/")
            (self._new / rest).mkdir(parents=True, exist_ok=True)  # git keeps no empty folders
            return '"$here"/' + shlex.quote(os.path.join("project", rest).rstrip("/"))
        if not os.path.isdir(old):
            self.missing.append(f"the working directory {old}: it is not there")
        else:
            self.notes.append(f"it runs in {old}, as it did, not in the folder made here")
        return shlex.quote(old)

    def _inside(self, path: str) -> bool:
        return bool(self._old) and (path == self._old or path.startswith(f"{self._old}/"))

    def _relocated(self, text: str) -> str:
        """A word for the shell; paths that are in the new project point there."""
        if not self._old or self._new is None or self._old not in text:
            return shlex.quote(text)
        separators = re.split(r"([:=])", text)
        moved = []
        for part in separators:
            if self._inside(part):
                rest = part[len(self._old) :].lstrip("/")
                if (self._new / rest).exists():
                    part = str(self._new / rest) if rest else str(self._new)
            moved.append(part)
        return shlex.quote("".join(moved))
