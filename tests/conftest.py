"""Settings that pyproject.toml has no place for."""

import atexit
import gc
import itertools
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

# No deadlines: three workers share two cores with the processes that the tests start, and a first
# call into torch or jax takes as long as it takes.
settings.register_profile("tensortap", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tensortap")

# A shell ignores SIGINT for programs that it starts in the background, and they pass that on to
# the processes that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Before torch is loaded, and for the processes that the tests start: threads of OpenMP spin while
# they wait for each other, and with as many processes as cores they wait most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SETTINGS = {
    # runs search all that the tests have imported for monkey patches; tests/provenance does that
    "TENSORTAP_MODIFICATIONS": "0",
    "TENSORTAP_ARENA": "32MB",  # every program of the tests prepares its own
}
os.environ.update(SETTINGS)  # for doctests and for fixtures that several tests share

atexit.register(gc.unfreeze)  # else nanobind takes what is frozen for leaks when Python exits


@pytest.fixture(scope="session")
def config_folders(tmp_path_factory):
    """Return paths of folders that do not exist yet."""
    folder = tmp_path_factory.mktemp("config")
    return (str(folder / str(number)) for number in itertools.count())


@pytest.fixture(autouse=True)
def isolated_settings(config_folders, monkeypatch):
    """Hide the key, the settings and the rank of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("TENSORTAP_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CONFIG_HOME", next(config_folders))


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
    pipeline = sys.modules.get("tensortap.capture.pipeline")
    if pipeline is not None:
        pipeline.pipeline.restart()
