"""Virtual environments that are kept between runs of the tests, outside of the checkout."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tensortap-tests"


@contextlib.contextmanager
def environment(name):
    """Yield the folder of an environment, which nobody else uses meanwhile.

    It is made anew whenever the dependencies of the package change: what is no longer required
    must not be there from before.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [
        project["dependencies"],
        *(extras[extra] for extra in ("view", "hdf5", "video", "notebook")),
    ]
    key = hashlib.sha256(repr((sys.version, needed)).encode()).hexdigest()
    folder, stamp = CACHE / name, CACHE / name / ".made-for"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != key:
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
            stamp.write_text(key)
        yield folder


def shell(script, folder, **settings):
    """Run a script with bash as a user would: stop at the first error, and return the output.

    The environment of the tests, which has this checkout in it, is left behind."""
    names = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "0", **settings}  # no .pyc
    kept = {name: text for name, text in os.environ.items() if name not in names}
    done = subprocess.run(
        ["/bin/bash", "-euc", script], cwd=folder, timeout=900, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**kept, **settings},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout
