"""Models, training functions and comparisons for the tests of intercepted JAX functions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tensortap as tap
from tensortap.core.record import Kind

ACT, GRAD = Kind.ACTIVATION, Kind.GRADIENT


class MLP(nn.Module):
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dtype=self.dtype)(x)
        x = nn.relu(x)
        return nn.Dense(3, dtype=self.dtype)(x)


MLP_NAMES = ("Dense_0", "Dense_1", "MLP")


def batch(shape=(5, 4), seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def parameters(model, x, seed=0):
    """Return parameters drawn by NumPy: JAX would compile every operation that draws them."""
    random = np.random.default_rng(seed)
    draw = lambda leaf: jnp.asarray(0.5 * random.standard_normal(leaf.shape), leaf.dtype)
    return jax.tree.map(draw, jax.eval_shape(model.init, jax.random.key(0), x))


def training(model, optimizer, x):
    """Return parameters, optimizer state, and a plain update function."""
    params = parameters(model, x, seed=1)

    def loss(params, x):
        return jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)

    def update(params, state, x):
        grads = jax.grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    return params, optimizer.init(params), update


def everything(kind, name):
    """Want everything."""
    return True


def key(observation):
    seen = observation.observed
    return seen.kind, seen.name, seen.call


def observed(observations):
    return [each.observed for each in observations]


def names_of(observations):
    return [each.observed.name for each in observations]


def summaries_of(observations):
    return {key(each): each.pending.resolve() for each in observations}


def both_kinds(*names, calls=1):
    return {(kind, name, call) for kind in (ACT, GRAD) for name in names for call in range(calls)}


def assert_same(tree, other):
    """Assert that two trees are bit-identical."""
    a, b = jax.tree.leaves(tree), jax.tree.leaves(other)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def assert_agrees(summary, array, tolerance=1e-5, same_program=True):
    """Assert that a summary describes an array.

    If another program has computed the array, XLA may have rounded its last bits differently.
    """
    want = tap.viz.summarize(np.asarray(array))
    for name in ("count", "zeros", "nans", "posinfs", "neginfs"):
        assert getattr(summary, name) == getattr(want, name), name
    for name in ("min", "max"):
        value = getattr(want, name)
        assert getattr(summary, name) == (
            value if same_program else pytest.approx(value, rel=1e-6)
        ), name
    if same_program:
        assert summary.exponents == want.exponents
    for name in ("std", "mean_abs", "max_abs", "min_abs", "rm2", "rm4", "rm8"):
        assert getattr(summary, name) == pytest.approx(getattr(want, name), rel=tolerance), name
    assert summary.mean == pytest.approx(want.mean, abs=tolerance * want.mean_abs)
