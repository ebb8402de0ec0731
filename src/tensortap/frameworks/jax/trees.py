"""The names of the leaves of parameter and optimizer trees, and their statistics in one go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tensortap.frameworks.jax.device_stats import can_reduce, pack

Path = tuple[str, ...]


def key_name(key: Any) -> str:
    """A key of a path as a word: ``['kernel']``, ``.mu`` and ``[0]`` are kernel, mu and 0."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


_known: dict[Any, list[Path]] = {}


def arrays_of(tree: Any) -> tuple[list[Path], list[Any]]:
    """The paths and the arrays of a tree; leaves that are no arrays are left out.

    >>> arrays_of({"params": {"Dense_0": {"bias": np.zeros(2)}}})[0]
    [('params', 'Dense_0', 'bias')]
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    paths = _known.get(structure)
    if paths is None:
        found = jax.tree_util.tree_flatten_with_path(tree)[0]
        paths = [_path(key_name(key) for key in keys) for keys, _ in found]
        if len(_known) >= 64:  # a tree that is another one at every step must not fill memory
            _known.clear()
        _known[structure] = paths
    kept = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    return [paths[i] for i in kept], [leaves[i] for i in kept]


def _path(keys: Iterable[str]) -> Path:
    path = tuple(keys)
    # a variable of nnx holds its array under this key
    return path[:-1] if len(path) > 1 and path[-1] == "value" else path


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():  # donated to the next step
            return False
        return isinstance(leaf.dtype, np.dtype) and can_reduce(leaf.dtype)
    return isinstance(leaf, (bool, int, float))


def parameter_name(path: Path) -> str:
    """The name of a parameter: its path without the collection that all of them are in.

    >>> parameter_name(("params", "Dense_0", "kernel"))
    'Dense_0.kernel'
    """
    return ".".join(_bare(path))


def _bare(path: Path) -> Path:
    return path[1:] if len(path) > 1 and path[0] == "params" else path


def state_name(path: Path, parameters: set[Path]) -> tuple[str, str]:
    """The parameter that a leaf of an optimizer's state belongs to, and which figure it is.

    Whatever a chain of optax looks like, the state of a parameter lies under the path of that
    parameter. What belongs to none (a step counter) goes under ``optimizer`` and its place.

    >>> state_name(("0", "mu", "params", "Dense_0", "kernel"), {("Dense_0", "kernel")})
    ('Dense_0.kernel', 'mu')
    >>> state_name(("0", "count"), {("Dense_0", "kernel")})
    ('optimizer.0', 'count')
    """
    for start in range(len(path)):
        if path[start:] in parameters:
            above = path[:start]
            if above and above[-1] == "params":
                above = above[:-1]
            return ".".join(path[start:]), _figure(above)
    return ".".join(("optimizer", *path[:-1])), path[-1] if path else "state"


def _figure(above: Path) -> str:
    """The last word that is no number: ``mu`` of ``0.mu``."""
    words = [word for word in above if not word.isdigit()]
    return words[-1] if words else "state"


def bare_paths(paths: Iterable[Path]) -> set[Path]:
    """The paths of parameters as `state_name` looks for them."""
    return {_bare(path) for path in paths}


def pack_all(arrays: list[Any]) -> jax.Array:
    """The statistics of all arrays, one after the other."""
    packed: jax.Array = _pack_all(arrays)
    return packed


def _pack_each(arrays: list[Any]) -> jax.Array:
    return jnp.concatenate([pack(jnp.asarray(x)) for x in arrays])


_pack_all = jax.jit(_pack_each)
