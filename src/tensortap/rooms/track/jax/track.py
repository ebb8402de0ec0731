"""Tracking of a JAX program: what is computed inside its functions, and its states."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tensortap.core.record import Kind
from tensortap.rooms.track.jax.device_stats import can_reduce, pack, summary_at
from tensortap.rooms.track.jax.intercept import Intercept, Observation
from tensortap.rooms.track.jax.modules import Wants, key_name
from tensortap.rooms.track.observer import Observer
from tensortap.rooms.track.observing import Observed
from tensortap.rooms.track.packed import layout
from tensortap.values.jax.adapter import Deferred

NO_MODULES = (
    "no activations or gradients: it called no module of Flax or Equinox; tap.catch captures "
    "values in it"
)
Path = tuple[str, ...]


def hooks_of(model: Any, optimizer: Any, observer: Observer) -> JaxTracking | None:
    """Return hooks for a program with these parameters and optimizer state; None if it has none."""
    leaves = jax.tree_util.tree_leaves((model, optimizer))
    if not any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves):
        return None
    options = observer.options
    if any(options.of_rooms.values()):
        raise ValueError(f"{', '.join(options.of_rooms)} need a torch model")
    if options.stash is not None or options.tensors or options.digests:
        observer.unseen["inside compiled functions"] = (
            "stash, tensors and digests see states only; use tap.catch inside the function"
        )
    return JaxTracking(model, optimizer, observer)


class JaxTracking:
    """Observes intercepted functions, and parameters, optimizer state and gradients."""

    def __init__(self, model_state: Any, optimizer_state: Any, observer: Observer) -> None:
        self.observer = observer
        self._like = model_state
        self._intercept = Intercept(observer.wants, observer.fault)
        self._calls: dict[tuple[Kind, str], int] = {}
        # the arguments of `step`, in this order
        self._states = [
            name
            for name, kind, given in (
                ("model_state", Kind.WEIGHT, model_state is not None),
                ("optimizer_state", Kind.OPTIMISER_STATE, optimizer_state is not None),
                ("grads", Kind.WEIGHT_GRADIENT, True),
            )
            if kind in observer.kinds and given
        ]

    @property
    def names(self) -> Iterator[tuple[Kind, str]]:
        """Yield the parameters; modules are known once they were seen."""
        for path, _ in arrays_of(self._like):
            yield from (
                (kind, parameter_name(path)) for kind in (Kind.WEIGHT, Kind.WEIGHT_GRADIENT)
            )

    def attach(self) -> None:
        """Observe the initial weights; functions are observed only when `intercept` calls them."""
        # in later steps, those of the step before are known
        if not self.observer.capturing or self.observer.step_number != 0:
            return
        try:
            for seen, pending, array in observe_trees(self.observer.wants, self._like):
                seen = seen._replace(tags={"initial": "1"})
                self._add(seen, pending, array, step=-1)
        except Exception as error:
            self.observer.fault("initial weights", error)

    def detach(self) -> None:
        """Do nothing: there are no hooks."""

    def intercept(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the results of a function and record what its modules compute."""
        if not self.observer.capturing:
            return function(*args, **kwargs)
        results, observations = self._intercept(function, *args, **kwargs)
        name = getattr(function, "__name__", "function")
        try:
            calls = dict(self._calls)
            for seen, pending, _ in observations:
                if not self.observer.wants(seen.kind, seen.name):
                    continue  # a session has switched it off in this step
                key = seen.kind, seen.name
                call = seen.call + self._calls.get(key, 0)
                calls[key] = max(calls.get(key, 0), call + 1)
                self._add(seen._replace(call=call), pending)
            self._calls = calls
            self.observer.unseen.update(self._intercept.unseen)
            outputs = {Kind.ACTIVATION, Kind.GRADIENT} & set(self.observer.kinds)
            if outputs and not self._intercept.has_modules:
                self.observer.unseen.setdefault(name, NO_MODULES)
            self.observer.remarks.update(self._intercept.remarks)
        except Exception as error:
            self.observer.fault(name, error)
        return results

    def _add(
        self, seen: Observed, pending: Any, array: Any = None, step: int | None = None
    ) -> None:
        start = time.perf_counter_ns()
        self.observer.add(seen, None, pending, array, step)
        self.observer.costs.add([seen], [time.perf_counter_ns() - start])

    def end_step(self, *states: Any, **named: Any) -> None:
        """Record the states after a step."""
        if len(states) > len(self._states):
            expected = ", ".join(self._states) or "no states"
            raise TypeError(f"tracker.step takes {expected} here, and metrics as keyword arguments")
        given = {**dict(zip(self._states, states, strict=False)), **named}
        unknown = set(given) - set(self._states)
        if unknown:
            raise TypeError(f"{', '.join(unknown)} is not tracked")
        self._calls.clear()
        if not self.observer.capturing or not given:
            return
        observations = observe_trees(
            self.observer.wants,
            given.get("model_state"),
            given.get("optimizer_state"),
            given.get("grads"),
            like=self._like,
        )
        with jax.transfer_guard("allow"):  # the user's guard is not meant for us
            for seen, pending, array in observations:
                self._add(seen, pending, array)


# -- trees of parameters, gradients and optimizer state --------------------------------------


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
    leaves: list[tuple[Kind, str, dict[str, str], Any]] = []
    # in the order in which they are computed: what comes first is blamed
    for kind, tree in ((Kind.WEIGHT_GRADIENT, grads), (Kind.WEIGHT, params)):
        leaves += [(kind, parameter_name(path), {}, array) for path, array in arrays_of(tree)]
    if optimizer_state is not None:
        known = params if params is not None else like if like is not None else grads
        parameters = {_without_collection(path) for path, _ in arrays_of(known)}
        for path, array in arrays_of(optimizer_state):
            name, part = state_name(path, parameters)
            tags = {"state": part, "parameter": name}
            leaves.append((Kind.OPTIMISER_STATE, f"{name}.{part}", tags, array))
    leaves = [leaf for leaf in leaves if wants(leaf[0], leaf[1])]
    if not leaves:
        return []
    with jax.transfer_guard("allow"):  # the user's guard is not meant for us
        packed = _pack_all([array for *_, array in leaves])
    vector, start = Deferred(packed, packed.nbytes), 0
    observations = []
    for kind, name, tags, array in leaves:
        # as inside a jitted function
        dtype = jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(array)).name
        seen = Observed(name, kind, 0, "jax.Array", dtype, tuple(np.shape(array)), None, tags)
        observations.append(Observation(seen, summary_at(vector, start, dtype, seen.shape), array))
        start += layout(dtype).words
    return observations


_pack_all = jax.jit(lambda arrays: jnp.concatenate([pack(jnp.asarray(x)) for x in arrays]))


_paths: dict[Any, list[Path]] = {}  # by tree structure


def arrays_of(tree: Any) -> list[tuple[Path, Any]]:
    """Return the arrays of a tree with their paths, without leaves that are no arrays.

    >>> arrays_of({"params": {"Dense_0": {"bias": 0.5}}})
    [(('params', 'Dense_0', 'bias'), 0.5)]
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    paths = _paths.get(structure)
    if paths is None:
        keyed = jax.tree_util.tree_flatten_with_path(tree)[0]
        paths = [_path(tuple(map(key_name, keys))) for keys, _ in keyed]
        if len(_paths) >= 64:  # a program may use a new structure in every step
            _paths.clear()
        _paths[structure] = paths
    return [pair for pair in zip(paths, leaves, strict=True) if _is_array(pair[1])]


def _path(path: Path) -> Path:
    # a variable of nnx holds its array under this key
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
