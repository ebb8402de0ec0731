"""`make dist`: what it builds, and that the wheel works where there is no compiler."""

from __future__ import annotations

import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.environments import ROOT, environment, shell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

EXTENSIONS = ("capture._fast", "stats._kernel", "rooms.track.jax._xla")
LOAD = """
import importlib.machinery, importlib.util, pathlib, sys, tensortap
for name in sys.argv[1:]:
    (file,) = pathlib.Path(tensortap.__path__[0]).glob(name.replace(".", "/") + ".*.so")
    loader = importlib.machinery.ExtensionFileLoader(f"tensortap.{name}", str(file))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    loader.exec_module(importlib.util.module_from_spec(spec))
    print(name, "works")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build once; the environment of the tests has what `make dist` installs."""
    folder = tmp_path_factory.mktemp("dist")
    products = (ROOT / "build", ROOT / "dist", ROOT / "src" / "tensortap.egg-info")
    before = [path.exists() for path in products]
    stamp = Path(sys.prefix, ".ready-dist")
    shell(f"make dist VENV={sys.prefix} DIST={folder} PYTHONS={sys.executable} -o {stamp}", ROOT)
    assert [path.exists() for path in products] == before
    return folder


def test_sdist_and_wheel_are_complete(built):
    sdist, wheel = sorted(built.iterdir(), key=lambda path: path.suffix)
    assert re.fullmatch(r"tensortap-[\d.]+\.tar\.gz", sdist.name)
    assert re.search(r"-cp3\d+-cp3\d+-manylinux_\d+_\d+_\w+\.whl$", wheel.name)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    files = [path.relative_to(ROOT) for path in (ROOT / "src").rglob("*") if path.is_file()]
    wanted = {str(path) for path in files if path.suffix not in (".so", ".pyc")}
    assert {name for name in wanted if ".egg-info" not in name} <= inside
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= inside
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert len([name for name in packed if name.endswith(".so")]) == len(EXTENSIONS)
    sources = (".c", ".h", ".so", ".pyc")
    needed = {str(path.relative_to("src")) for path in files if path.suffix not in sources}
    assert {name for name in needed if ".egg-info" not in name} <= packed


def test_wheel_works_without_a_compiler(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    venv = environment(tmp_path / "venv", "torch")
    (tmp_path / "load.py").write_text(LOAD)
    said = shell(
        f"pip install -q {wheel}\n"
        f"python load.py {' '.join(EXTENSIONS)}\n"
        "tensortap demo --steps 40 --folder here",
        tmp_path, PATH=f"{venv}/bin", CC="/bin/false",
    )  # fmt: skip
    assert [name for name in EXTENSIONS if f"{name} works" not in said] == []
    assert re.search(r"first +blocks\.1\.mlp\.0 +Activation +step 20 ", said), said
    assert "a report needs plotly: pip install google-re2 kaleido" in said
    assert len(os.listdir(tmp_path / "here" / "runs")) == 2
