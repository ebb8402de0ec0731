"""Runs are private to their user, unless an option opens them."""

import os
import stat

import numpy as np
import pytest

import tensortap as tap


@pytest.fixture
def open_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(tmp_path) -> set[str]:
    run = tap.init(tmp_path)
    tap.catch(np.ones((100, 100)), "x")
    tap.dump({"a": 1}, "y")
    tap.finish()
    return {oct(stat.S_IMODE(path.stat().st_mode)) for path in (run, *run.rglob("*"))}


@pytest.mark.slow
@pytest.mark.attack("reading the run of somebody else")
def test_only_the_user_reads_a_run(tmp_path, open_umask):
    assert modes(tmp_path) == {"0o700", "0o600"}


@pytest.mark.slow
def test_option_leaves_access_to_the_umask(tmp_path, open_umask, monkeypatch):
    monkeypatch.setenv("TENSORTAP_SHARED", "1")
    assert modes(tmp_path) == {"0o755", "0o644"}


@pytest.mark.attack("reading the run of somebody else")
def test_only_the_user_reads_an_hdf5_file(tmp_path, open_umask):
    saver = tap.HDF5(tmp_path / "trace.h5")
    saver("x", [np.ones(2)], [0], [0])
    saver.close()
    assert oct(stat.S_IMODE((tmp_path / "trace.h5").stat().st_mode)) == "0o600"
