"""Virtual environments with what a part of tensortap declares that it needs, and nothing else."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def needed(*extras):
    """Return the installed packages that tensortap needs with some extras, directly or not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = [(text, ()) for text in project["dependencies"]]
    wanted += [(text, ()) for extra in extras for text in optional[extra]]
    found = {}
    while wanted:
        text, active = wanted.pop()
        need = Requirement(text)
        if need.marker and not any(need.marker.evaluate({"extra": e}) for e in (*active, "")):
            continue
        if need.name == "tensortap":
            wanted += [(text, ()) for extra in need.extras for text in optional[extra]]
        elif (need.name, frozenset(need.extras)) not in found:
            package = found[need.name, frozenset(need.extras)] = metadata.distribution(need.name)
            wanted += [(text, tuple(need.extras)) for text in package.requires or ()]
    return found.values()


def environment(folder, *extras):
    """Make an environment of links to the packages of the tests, and pip; return its folder.

    A package that nothing declares is missing in it, as in one that pip has filled from an index.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    tools = [metadata.distribution(name) for name in ("pip", "setuptools")]
    for package in (*needed(*extras), *tools):
        for name in {file.parts[0] for file in package.files} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(package.locate_file(name))
    pip = folder / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {shlex.quote(str(folder))}/bin/python -m pip "$@"\n')
    pip.chmod(0o755)
    return folder


def quick_compiler(folder):
    """Write a compiler that does not optimize, which takes longer than all else that it does.

    The extensions that the tests load are optimized."""
    compiler = folder / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    return str(compiler)


def shell(script, folder, **settings):
    """Run a script with bash as a user would: stop at the first error, and return the output.

    The environment of the tests, which has this checkout in it, is left behind."""
    names = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    # not from an index, and without .pyc files, which would take longer than the rest
    own = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_COMPILE": "0"}
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **own, **settings}
    kept = {name: text for name, text in os.environ.items() if name not in names}
    done = subprocess.run(
        ["/bin/bash", "-euc", script], cwd=folder, timeout=900, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**kept, **settings},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout
