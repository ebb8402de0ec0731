"""The frameworks that tensortap knows, looked up without importing any of them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

from tensortap.core.busy import importing
from tensortap.core.errors import WireError
from tensortap.core.rooms import offers
from tensortap.values.protocol import Framework

# Folder of each framework, and the class that exists once the framework has been imported. While
# another thread is still importing it there are no values of it. NumPy comes last: arrays of other
# frameworks are asked for first.
_FRAMEWORKS = {
    "torch": "torch.Tensor",
    "jax": "jax.Array",
    "mlx": "mlx.core.array",
    "numpy": "numpy.ndarray",
}


def loaded_frameworks() -> Iterator[Framework]:
    """Yield the frameworks that the user has imported.

    >>> "numpy" in [framework.name for framework in loaded_frameworks()]
    True
    """
    for name in _FRAMEWORKS:
        if _is_loaded(name):
            yield framework_named(name)


def _is_loaded(name: str) -> bool:
    module, _, attribute = _FRAMEWORKS[name].rpartition(".")
    found = sys.modules.get(module)
    if found is None or not hasattr(found, attribute):
        return False
    return not getattr(found.__spec__, "_initializing", False)


@functools.cache
def framework_named(name: str) -> Framework:
    """Return a framework by the name of its folder, importing it if necessary."""
    if name not in _FRAMEWORKS:
        for framework in offered_frameworks():
            if framework.name == name:
                return framework
        raise WireError(f"no framework is called {name[:40]!r}")
    with importing:
        found: Framework = importlib.import_module(f"tensortap.values.{name}.adapter").FRAMEWORK
    return found


def offered_frameworks() -> Iterator[Framework]:
    """Yield the frameworks that other packages bring: what rooms offer as ``frameworks``."""
    yield from offers("frameworks")


def parts(package: str) -> Iterator[ModuleType]:
    """Yield what a package has for the frameworks that the user has imported.

    These are its modules, or packages, that are named after a framework, such as
    ``tensortap.rooms.ops.torch``. A room calls their functions.
    """
    for name in _FRAMEWORKS:
        if _is_loaded(name) and (found := part_named(package, name)) is not None:
            yield found


@functools.cache
def part_named(package: str, framework: str) -> ModuleType | None:
    """Return what a package has for a framework, importing it if necessary; None for nothing."""
    name = f"{package}.{framework}"
    return None if importlib.util.find_spec(name) is None else importlib.import_module(name)
