"""A JAX training program: a step function whose whole state is in its arguments and results.

An argument that the last call returned is not copied again: it is what the replay computes. So the
state is what the last call returned, and a batch is everything else: data, and random keys.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tensortap.rooms.blackbox.replaying import Kept, Training
from tensortap.values.snapshot import digest_of

_SMALL = 4096  # bytes of a result that is read after each step: a loss, a metric
_KEY = (np.dtype(np.uint32), (2,))  # of random keys that are plain arrays


class HostArray(NamedTuple):
    """A copy of an array in the memory of the host, and what it takes to make it again."""

    copy: np.ndarray[Any, Any]
    sharding: Any = None  # None if JAX may choose
    key: Any = None  # the implementation of a random key
    is_weak: bool = False
    is_jax: bool = True

    def build(self) -> Any:
        """Return a fresh array; a step may donate it."""
        if not self.is_jax:
            return self.copy.copy()
        if self.is_weak and not self.copy.ndim:
            return jnp.asarray(self.copy.item())
        array = jnp.array(self.copy)
        if self.key is not None:
            array = jax.random.wrap_key_data(array, impl=self.key)
        return array if self.sharding is None else jax.device_put(array, self.sharding)


class LastResult(NamedTuple):
    """Stands for an array that the last call returned: which one."""

    number: int


def training(model: Any, optimizer: Any, others: tuple[Any, ...]) -> JaxTraining | None:
    """Return a JAX program whose steps can be run again; None if there is a model."""
    if model is not None:
        return None
    if optimizer is not None or others:
        raise TypeError("the state of a JAX program is in the arguments of its step: pass none")
    return JaxTraining()


class JaxTraining(Training):
    """A step function of pytrees."""

    intercepts = True

    def __init__(self) -> None:
        self._results: list[Any] = []  # leaves of what the last call returned

    # -- the state ------------------------------------------------------------------------------

    def keep_state(self, instead: Kept | None = None) -> Kept:
        copies = [_host(leaf) for leaf in self._results]
        return Kept((copies, self.keep_moment()), sum(map(_nbytes, copies)))

    def keep_present(self) -> Kept:
        return Kept((list(self._results), self.keep_moment()), 0)

    def check(self, kept: Kept) -> None:
        """Do nothing: the state is in the arguments of the step."""

    def restore(self, kept: Kept) -> None:
        self._results, moment = list(kept.content[0]), kept.content[1]
        self.restore_moment(moment)

    def keep_moment(self) -> Any:
        return random.getstate(), np.random.get_state()  # noqa: NPY002

    def restore_moment(self, moment: Any) -> None:
        python, numbers = moment
        random.setstate(python)
        np.random.set_state(numbers)  # noqa: NPY002

    # -- batches ---------------------------------------------------------------------------------

    def keep_batch(self, batch: Any) -> Kept:
        leaves, tree = jax.tree.flatten(batch)
        places = {id(leaf): index for index, leaf in enumerate(self._results) if _is_array(leaf)}
        kept = [
            LastResult(places[id(leaf)]) if id(leaf) in places else _host(leaf) for leaf in leaves
        ]
        return Kept((kept, tree), sum(map(_nbytes, kept)))

    def batch_of(self, kept: Kept) -> Any:
        leaves, tree = kept.content
        return jax.tree.unflatten(tree, [self._build(leaf) for leaf in leaves])

    def _build(self, leaf: Any) -> Any:
        if isinstance(leaf, LastResult):
            leaf = _host(self._results[leaf.number])  # copied: a step may donate it
        return leaf.build() if isinstance(leaf, HostArray) else leaf

    def rows_of(self, kept: Kept) -> int:
        sizes = {len(leaf.copy) for leaf in kept.content[0] if _has_rows(leaf)}
        return sizes.pop() if len(sizes) == 1 else 0

    def mixed(self, kept: Kept, other: Kept, rows: frozenset[int]) -> Any:
        (bad, tree), (good, other_tree) = kept.content, other.content
        if tree != other_tree:
            raise ValueError("the batches have different structures")
        chosen, leaves = sorted(rows), []
        for first, second in zip(bad, good, strict=True):
            leaf = second
            if _has_rows(first) and _has_rows(second):
                if first.copy.shape != second.copy.shape:
                    raise ValueError("the batches have different shapes")
                content = second.copy.copy()
                content[chosen] = first.copy[chosen]
                leaf = second._replace(copy=content)
            leaves.append(self._build(leaf))
        return jax.tree.unflatten(tree, leaves)

    # -- judging ---------------------------------------------------------------------------------

    def is_bad(self, result: Any, whole: bool) -> bool:
        leaves = [leaf for leaf in jax.tree.leaves(result) if _is_array(leaf) or whole]
        return any(_is_bad(leaf) for leaf in leaves if whole or leaf.nbytes <= _SMALL)

    def digest_of(self, result: Any) -> bytes:
        self._results = jax.tree.leaves(result)
        small = [x for x in self._results if _is_array(x) and x.nbytes <= _SMALL]
        return b"".join(digest_of(_read(leaf)) for leaf in small)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _read(leaf: Any) -> np.ndarray[Any, Any]:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _host(leaf: Any) -> Any:
    """Return a copy of an array in the memory of the host; anything else as it is."""
    if isinstance(leaf, np.ndarray):
        return HostArray(leaf.copy(), is_jax=False)
    if not isinstance(leaf, jax.Array):
        return leaf
    key = jax.random.key_impl(leaf) if _is_key(leaf) else None
    sharding = leaf.sharding if leaf.committed else None
    return HostArray(np.array(_read(leaf)), sharding, key, getattr(leaf, "weak_type", False))


def _nbytes(leaf: Any) -> int:
    return leaf.copy.nbytes if isinstance(leaf, HostArray) else 0


def _has_rows(leaf: Any) -> bool:
    if not isinstance(leaf, HostArray) or leaf.key is not None or not leaf.copy.ndim:
        return False
    return (leaf.copy.dtype, leaf.copy.shape) != _KEY


def _is_bad(leaf: Any) -> bool:
    if isinstance(leaf, float):
        return not np.isfinite(leaf)
    if not _is_array(leaf) or _is_key(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return False
    return not bool(np.isfinite(_read(leaf)).all())
