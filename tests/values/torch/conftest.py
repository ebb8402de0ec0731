"""What must not notice tensortap: modes of the user, and devices that compute."""

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture
def modes():
    """Return a context in which both kinds of modes list the operations that they see."""

    @contextlib.contextmanager
    def active():
        seen = []

        class Functions(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        class Dispatches(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        with Functions(), Dispatches():
            yield seen

    return active


@pytest.fixture
def waits(monkeypatch):
    """Return a context in which operations that wait for a device raise."""

    @contextlib.contextmanager
    def forbidden():
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):

                def fail(*args, name=name, **kwargs):
                    raise AssertionError(f"{name} waits for the device")

                patch.setattr(torch.Tensor, name, fail)
            yield

    return forbidden
