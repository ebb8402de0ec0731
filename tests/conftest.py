"""Settings that pyproject.toml has no place for."""

import gc
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# No deadlines: two workers share two cores with the processes that the tests start, and a first
# call into torch or jax takes as long as it takes.
settings.register_profile("tensortap", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tensortap")


@pytest.fixture(autouse=True, scope="session")
def few_modules():
    """Runs that tests open and end: what all tests together have imported is not gone through
    for monkey patches each time. tests/provenance looks at everything, as users have it."""
    from tensortap.provenance.modifications import Finder

    whole = Finder._walk

    def walk(finder):
        current = os.environ.get("PYTEST_CURRENT_TEST", "")
        if current.startswith("tests/provenance/"):
            yield from whole(finder)

    Finder._walk = walk
    yield
    Finder._walk = whole


@pytest.fixture(autouse=True, scope="module")
def only_what_is_new():
    """A collection of garbage goes through what the tests of a file have made, not through what
    all before it have left: in a process that has compiled for JAX, that takes seconds each time.

    What is frozen is alive; a test that looks at what dies has made it itself."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def first_step():
    """A test begins with a clock that nobody has advanced: the process may have run others."""
    yield
    session = sys.modules.get("tensortap.session")
    if session is not None:
        session.session.restart()


@pytest.fixture(scope="session")
def torch_forks():
    """Runs programs that need torch and not much else."""
    from tests.forks import Forks

    found = Forks()
    yield found
    found.close()
