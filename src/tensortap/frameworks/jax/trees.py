"""Observation of parameter, gradient and optimizer-state trees, and the names of their leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tensortap.frameworks.jax.device_stats import can_reduce, pack
from tensortap.frameworks.jax.flax_modules import Wants, key_name
from tensortap.frameworks.jax.observation import DeviceVector, Observation
from tensortap.record import Kind
from tensortap.stats.packed import layout

Path = tuple[str, ...]


def observe_trees(
    wants: Wants,
    params: Any = None,
    optimizer_state: Any = None,
    grads: Any = None,
    *,
    like: Any = None,
) -> list[Observation]:
    """Return the observations of all leaves, with the statistics of all in one computation.

    `like` are parameters that name the optimizer's state if `params` are not given.
    """
    names: list[tuple[Kind, str, str]] = []
    arrays: list[Any] = []
    for kind, tree in ((Kind.WEIGHT, params), (Kind.WEIGHT_GRADIENT, grads)):
        paths, leaves = arrays_of(tree)
        names += [(kind, parameter_name(path), "") for path in paths]
        arrays += leaves
    if optimizer_state is not None:
        known = params if params is not None else like if like is not None else grads
        parameters = {_without_collection(path) for path in arrays_of(known)[0]}
        paths, leaves = arrays_of(optimizer_state)
        names += [(Kind.OPTIMISER_STATE, *state_name(path, parameters)) for path in paths]
        arrays += leaves
    wanted = [i for i, (kind, name, _) in enumerate(names) if wants(kind, name)]
    if not wanted:
        return []
    chosen = [arrays[i] for i in wanted]
    with jax.transfer_guard("allow"):  # the user's guard is not meant for us
        vector, start = DeviceVector(_pack_all(chosen)), 0
    observations = []
    for i, array in zip(wanted, chosen, strict=True):
        kind, name, part = names[i]
        # as inside a jitted function
        dtype = jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(array)).name
        shape = tuple(np.shape(array))
        observations.append(
            Observation(kind, name, part, "", dtype, shape, 0, vector, start, array)
        )
        start += layout(dtype).words
    return observations


_pack_all = jax.jit(lambda arrays: jnp.concatenate([pack(jnp.asarray(x)) for x in arrays]))


_paths: dict[Any, list[Path]] = {}  # by tree structure


def arrays_of(tree: Any) -> tuple[list[Path], list[Any]]:
    """Return the paths and the arrays of a tree, without leaves that are no arrays.

    >>> arrays_of({"params": {"Dense_0": {"bias": np.zeros(2)}}})[0]
    [('params', 'Dense_0', 'bias')]
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    paths = _paths.get(structure)
    if paths is None:
        keyed = jax.tree_util.tree_flatten_with_path(tree)[0]
        paths = [_path(key_name(key) for key in keys) for keys, _ in keyed]
        if len(_paths) >= 64:  # a program may use a new structure in every step
            _paths.clear()
        _paths[structure] = paths
    kept = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    return [paths[i] for i in kept], [leaves[i] for i in kept]


def _path(keys: Iterable[str]) -> Path:
    path = tuple(keys)
    # an nnx variable holds its array under this key
    return path[:-1] if len(path) > 1 and path[-1] == "value" else path


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():  # donated to the next step
            return False
        return isinstance(leaf.dtype, np.dtype) and can_reduce(leaf.dtype)
    return isinstance(leaf, (bool, int, float))


def _without_collection(path: Path) -> Path:
    return path[1:] if len(path) > 1 and path[0] == "params" else path


def parameter_name(path: Path) -> str:
    """Return the name of a parameter: its path without the ``params`` collection of Flax.

    >>> parameter_name(("params", "Dense_0", "kernel"))
    'Dense_0.kernel'
    """
    return ".".join(_without_collection(path))


def state_name(path: Path, parameters: set[Path]) -> tuple[str, str]:
    """Return the parameter that a leaf of an optimizer's state belongs to, and its entry.

    However optax transformations are chained, the state of a parameter is stored under the path
    of that parameter. Other leaves, such as step counters, go under ``optimizer`` and their path.

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
            words = [word for word in above if not word.isdigit()]
            return ".".join(path[start:]), words[-1] if words else "state"
    return ".".join(("optimizer", *path[:-1])), path[-1] if path else "state"
