"""Names and outputs of the modules of nnx and Equinox."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from tensortap.core.record import Kind
from tensortap.rooms.track.jax.intercept import Intercept
from tensortap.rooms.track.jax.track import observe_trees
from tests.track.jax.programs import (
    ACT,
    assert_agrees,
    assert_same,
    batch,
    both_kinds,
    everything,
    key,
    names_of,
    observed,
    summaries_of,
)

pytestmark = pytest.mark.slow  # each test compiles


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs), Layer(rngs)]) if hasattr(nnx, "List") else [
            Layer(rngs), Layer(rngs)]  # fmt: skip
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def parts():
    """The graph and the parameters of a `Net`, whose initialization takes seconds to compile."""
    return nnx.split(Net(nnx.Rngs(0)))


NEW_NNX = "model" in inspect.signature(nnx.Optimizer.update).parameters
NNX = {"Net", "head", "layers.0", "layers.0.linear", "layers.1", "layers.1.linear"}


def test_nnx_functional_style(parts):
    graph, params = parts
    x = batch()

    @jax.jit
    def update(params, x):
        grads = jax.grad(lambda p: jnp.mean(nnx.merge(graph, p)(x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads

    results, seen = Intercept()(update, params, x)
    assert_same(results, update(params, x))
    summaries = summaries_of(seen)
    assert set(summaries) == both_kinds(*NNX)
    assert_agrees(summaries[ACT, "Net", 0], nnx.merge(graph, params)(x))
    assert Net.__call__.__name__ == "__call__"
    assert not hasattr(Net.__call__, "__wrapped__")


def test_nnx_jit_and_its_optimizer(parts):
    x = batch()

    @nnx.jit
    def update(model, optimizer, x):
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        # before Flax 0.11 the optimizer held the model
        optimizer.update(*((model, grads) if NEW_NNX else (grads,)))
        return grads

    def start():
        graph, params = parts
        model = nnx.merge(graph, jax.tree.map(jnp.copy, params))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    model, optimizer = start()
    ours, our_optimizer = start()
    intercept = Intercept()
    for _ in range(3):
        grads = update(model, optimizer, x)
        our_grads, seen = intercept(update, ours, our_optimizer, x)
        assert set(map(key, seen)) == both_kinds(*NNX)
    assert intercept.unseen == {}
    assert_same(nnx.state(model), nnx.state(ours))
    assert_same(grads, our_grads)
    trees = observe_trees(
        everything, nnx.state(ours, nnx.Param), nnx.state(our_optimizer), our_grads
    )
    names = {kind: {o.name for o in observed(trees) if o.kind is kind} for kind in Kind}
    weights = names[Kind.WEIGHT]
    assert "layers.0.linear.kernel" in weights
    assert names[Kind.WEIGHT_GRADIENT] == weights
    assert {f"{name}.mu" for name in weights} <= names[Kind.OPTIMISER_STATE]


class EquinoxBlock(eqx.Module):
    first: eqx.nn.Linear
    layers: list

    def __init__(self, key):
        self.first = eqx.nn.Linear(4, 4, key=key)
        self.layers = [eqx.nn.Linear(4, 4, key=key), eqx.nn.MLP(4, 4, 8, 1, key=key)]

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_equinox_modules_are_named_by_their_paths():
    model, x = EquinoxBlock(jax.random.key(0)), batch()
    call = eqx.nn.Linear.__call__

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model, x):
        return jnp.sum(jax.vmap(model)(x) ** 2)

    want = loss(model, x)
    intercept = Intercept()
    results, seen = intercept(loss, model, x)
    assert_same(eqx.filter(results, eqx.is_array), eqx.filter(want, eqx.is_array))
    outputs = ["first", "layers.0", "layers.1.layers.0", "layers.1.layers.1", "layers.1",
               "EquinoxBlock"]  # fmt: skip
    assert names_of(seen)[:6] == outputs
    assert sorted(names_of(seen)[6:]) == sorted(outputs)  # their gradients
    assert seen[0].observed.type == "equinox.nn._linear.Linear"
    assert intercept.unseen == {}
    assert eqx.nn.Linear.__call__ is call
    names = names_of(observe_trees(everything, model, None, results[1]))
    assert {"first.weight", "layers.1.layers.0.bias"} <= set(names)
