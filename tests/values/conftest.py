"""Shared fixtures."""

import pytest

from tensortap.core.buffers import Pool


@pytest.fixture
def pool():
    return Pool()


def pytest_generate_tests(metafunc):
    """Run the tests of a `FrameworkContract` once per dtype of its framework."""
    if "dtype" in metafunc.fixturenames and hasattr(metafunc.cls, "dtypes"):
        metafunc.parametrize("dtype", metafunc.cls.dtypes)
