"""packages.json: versions, locations and origins of packages."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_imported_packages_and_their_location(python):
    info = json.loads(
        python("""
            import json, numpy, typing_extensions
            from tensortap.rooms.provenance.runtime import packages_info
            print(json.dumps(packages_info()))
        """)
    )
    import numpy

    assert info.keys() == {"python_version", "platform", "all_packages", "packages"}
    assert info["python_version"] == platform.python_version()
    for name in ("numpy", "torch", "hypothesis"):
        assert info["all_packages"][name] == importlib.metadata.version(name)
    assert info["packages"]["numpy"] == {
        "version": numpy.__version__,
        "location": os.path.dirname(numpy.__file__),
    }
    assert info["packages"]["typing_extensions"]["location"].endswith("typing_extensions.py")
    assert "hypothesis" not in info["packages"]


@pytest.fixture
def installed(tmp_path):
    """A folder of distributions on the path of a Python process."""
    folder = tmp_path / "site"

    def add(name, version="1.0", **files):
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file, content in files.items():
            (info / file.replace("__", ".")).write_text(content)

    def look(code=""):
        code = f"{code}\nimport json; from tensortap.rooms.provenance.runtime import packages_info"
        code += "\nprint(json.dumps(packages_info()))"
        path = os.pathsep.join([str(folder), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    add.look = look
    return add


def test_origin_of_packages_that_are_on_no_index(installed, tmp_path):
    def url(**rest):
        return json.dumps(rest)

    source = str(tmp_path / "my source")
    installed(
        "edited",
        direct_url__json=url(
            url=f"file://{source.replace(' ', '%20')}", dir_info={"editable": True}
        ),
    )
    installed("local", direct_url__json=url(url=f"file://{source}", dir_info={}))
    vcs = {"vcs": "git", "commit_id": "abc123"}
    installed("vcs", direct_url__json=url(url="https://me:tok@example.org/x.git", vcs_info=vcs))
    installed("broken", direct_url__json="{no json")
    installed("nothing")
    packages = installed.look()["packages"]
    assert packages["edited"]["editable"] is True
    assert packages["edited"]["source"] == source
    assert "editable" not in packages["local"]
    assert packages["vcs"]["url"] == "https://***@example.org/x.git"
    assert packages["vcs"]["commit_id"] == "abc123"
    assert not {"broken", "nothing"} & packages.keys()


def test_path_and_metadata_of_distributions(installed, tmp_path):
    installed("fine")
    installed("numpy", "0.0.1")  # the first one on the path counts
    (tmp_path / "site" / "bad-1.0.dist-info").mkdir()
    (tmp_path / "site" / "ugly-1.0.dist-info").mkdir()
    (tmp_path / "site" / "ugly-1.0.dist-info" / "METADATA").write_bytes(b"\xff\xfeName")
    found = installed.look()["all_packages"]
    assert (found["fine"], found["numpy"]) == ("1.0", "0.0.1")
    assert not {"bad", "ugly"} & found.keys()
