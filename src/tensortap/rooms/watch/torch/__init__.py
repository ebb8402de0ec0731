"""Torch modules, parameters and tensors as `watch` needs them."""

from tensortap.rooms.watch.torch.hooks import (
    after_fork,
    hooks_on,
    survives_fork,
    version_of,
    without_graph,
)
from tensortap.rooms.watch.torch.probes import find_probes

__all__ = [
    "after_fork",
    "find_probes",
    "hooks_on",
    "survives_fork",
    "version_of",
    "without_graph",
]
