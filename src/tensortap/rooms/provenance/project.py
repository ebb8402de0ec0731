"""The project that runs, and the owner of a file: the project, a package, or Python itself."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from pathlib import Path

PYTHON = "python"  # the owner of the standard library


def project_folder() -> Path:
    """Return the folder of the main script, or the working directory if there is none.

    A launcher that a package has installed (torchrun, pytest, ipykernel) is no main script.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(file, str) and os.path.isfile(file):
        path = os.path.abspath(file)
        scripts = os.path.join(sysconfig.get_path("scripts"), "")
        if not path.startswith(scripts) and owner_of_file(path) is None:
            return Path(path).parent
    try:
        return Path.cwd()
    except OSError:  # it was deleted
        return Path(os.sep)


@functools.cache
def _library_folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders of installed packages and those of the standard library."""
    sites = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    sites |= set(site.getsitepackages()) | {site.getusersitepackages()}
    stdlib = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    both = []
    for folders in (sites, stdlib):
        real = folders | {os.path.realpath(folder) for folder in folders}
        ordered = sorted((os.path.join(folder, "") for folder in real), key=len, reverse=True)
        both.append(tuple(ordered))
    return both[0], both[1]


def owner_of_file(file: str) -> str | None:
    """Return the package that a file was installed with, "python", or None for other files.

    >>> import json
    >>> owner_of_file(json.__file__)
    'python'
    """
    sites, stdlib = _library_folders()
    for folder in sites:
        if file.startswith(folder):
            return file[len(folder) :].partition(os.sep)[0].partition(".")[0]
    for folder in ("/site-packages/", "/dist-packages/"):  # of another environment on the path
        _, found, rest = file.rpartition(folder)
        if found:
            return rest.partition("/")[0].partition(".")[0]
    return PYTHON if file.startswith(("<frozen ", *stdlib)) else None
