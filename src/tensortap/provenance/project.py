"""Which project runs, and whom a file belongs to: the project, a package, Python itself."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from pathlib import Path

PYTHON = "python"  # the owner of the standard library
PROJECT = "project"  # the owner of the code that runs


def main_script() -> Path | None:
    """The script that was started, unless it is a launcher that some package brought."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(file, str) or not os.path.isfile(file):
        return None
    path = Path(file).absolute()
    # torchrun, pytest, ipykernel: the program of the user is not there
    return None if _installed(str(path)) else path


def project_folder() -> Path:
    """The folder of the main script, else the working directory."""
    script = main_script()
    if script is not None:
        return script.parent
    try:
        return Path.cwd()
    except OSError:  # it was deleted under our feet
        return Path(os.sep)


@functools.cache
def _stdlib() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib")
    found = {sysconfig.get_path(name) for name in names}
    found |= {os.path.realpath(folder) for folder in found}
    return tuple(os.path.join(folder, "") for folder in found)


@functools.cache
def _sites() -> tuple[str, ...]:
    found = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    found |= set(site.getsitepackages()) | {site.getusersitepackages()}
    found |= {os.path.realpath(folder) for folder in found}
    return tuple(sorted((os.path.join(folder, "") for folder in found), key=len, reverse=True))


def _installed(file: str) -> bool:
    scripts = os.path.join(sysconfig.get_path("scripts"), "")
    return file.startswith(scripts) or owner_of_file(file) is not None


def owner_of_file(file: str) -> str | None:
    """The package that a file was installed with, ``"python"``, or None: it lies elsewhere.

    >>> import json
    >>> owner_of_file(json.__file__)
    'python'
    """
    for folder in _sites():
        if file.startswith(folder):
            return file[len(folder) :].partition(os.sep)[0].partition(".")[0]
    for mark in ("/site-packages/", "/dist-packages/"):  # of another environment on the path
        _, found, rest = file.rpartition(mark)
        if found:
            return rest.partition("/")[0].partition(".")[0]
    if file.startswith(("<frozen ", *_stdlib())):
        return PYTHON
    return None


class Owners:
    """Whom code belongs to, asked for by its file and its module.

    >>> import json
    >>> Owners(Path("/nowhere")).of(json.__file__, "json")
    'python'
    """

    def __init__(self, root: Path) -> None:
        self._roots = tuple(
            {os.path.join(str(r), "") for r in (root, Path(os.path.realpath(root)))}
        )
        self._known: dict[str, str | None] = {}

    def of(self, file: str, module: str) -> str:
        """The name of the owner: a package, ``"project"`` or ``"python"``."""
        if file not in self._known:
            self._known[file] = self._of_file(file)
        owner = self._known[file]
        return owner if owner is not None else self.of_module(module)

    def of_module(self, module: str) -> str:
        """The owner of code that has no file of its own: typed in, or generated."""
        top = module.partition(".")[0]
        if top in ("__main__", "__mp_main__"):
            return PROJECT
        return PYTHON if top in sys.stdlib_module_names else top

    def _of_file(self, file: str) -> str | None:
        owner = owner_of_file(file)
        if owner is None and file.startswith(self._roots):
            return PROJECT
        return owner
