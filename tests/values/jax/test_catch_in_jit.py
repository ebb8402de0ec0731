"""`tap.catch` inside functions that JAX compiles, vectorizes and differentiates."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import tensortap as tap
from tensortap.capture import catch as catching
from tensortap.capture.pipeline import Pipeline
from tensortap.capture.queue import Queue
from tensortap.rooms.track.memory import MemorySink
from tensortap.values import rebuild
from tests.track.jax.programs import batch, parameters


@pytest.fixture
def pipeline(monkeypatch):
    """Return a pipeline that keeps everything in memory, used by `tap.catch`."""
    fresh = Pipeline()
    fresh.attach(Queue(MemorySink(1 << 30, fresh.ledger), budget=1 << 30, name="test"))
    monkeypatch.setattr(catching, "pipeline", fresh)
    yield fresh
    fresh.close()


@pytest.fixture
def caught(pipeline):
    """Return a function that waits and gives the records of a name."""

    def records(name):
        pipeline.flush()
        return [r for r in pipeline.queues[0].sink.records if r.name == name]

    return records


def values(records):
    return [np.asarray(rebuild(record.value)).tolist() for record in records]


def test_captures_the_value_of_every_call(caught):
    @jax.jit
    def double(x):
        y = x * 2
        tap.catch(y, "y")
        tap.catch(y + 1)
        return y

    for i in range(3):
        assert double(float(i)) == 2 * i
    records = caught("y")
    assert values(records) == [0.0, 2.0, 4.0]
    assert [r.step for r in records] == [0, 1, 2]
    assert values(caught("y + 1")) == [1.0, 3.0, 5.0]
    assert isinstance(rebuild(records[0].value), jax.Array)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "complex64", "float8_e4m3fn"])
def test_values_are_bit_identical(caught, name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    raw = np.random.default_rng(0).integers(0, 256, 999 * dtype.itemsize, np.uint8)
    x = raw.view(dtype) if name != "bool" else raw % 2 == 0
    jax.jit(lambda x: tap.catch(x, name) and None)(x)
    (record,) = caught(name)
    assert (record.dtype, record.shape) == (name, (999,))
    assert np.asarray(rebuild(record.value)).tobytes() == x.tobytes()


def test_selection_applies_to_calls_not_traces(caught):
    asked = []

    def condition(value):
        asked.append(type(value))
        return value % 3 == 0

    @jax.jit
    def function(x):
        tap.catch(x, "every", every=4)
        tap.catch(x, "first", first=2)
        tap.catch(x, "both", every=3, first=2)
        tap.catch(x, "when", when=condition)
        tap.catch(x // 4, "changed", changed=True)
        tap.catch(x, "never", when=False)
        return x

    for i in range(10):
        function(i).block_until_ready()
    function(1.0)  # traced again: counting continues
    assert values(caught("every")) == [0, 4, 8]
    assert values(caught("first")) == [0, 1]
    assert values(caught("both")) == [0, 3]
    assert values(caught("when")) == [0, 3, 6, 9]
    assert len(asked) == 11
    assert issubclass(asked[0], np.ndarray)
    assert values(caught("changed"))[:3] == [0, 1, 2]
    assert caught("never") == []


@pytest.mark.slow
def test_scan_and_vmap_and_grad(caught):
    def loss(w, x):
        def body(carry, item):
            carry = carry * w + item
            tap.catch(carry, "carry")
            return carry, None

        return jax.lax.scan(body, 0.0, x)[0]

    x = jnp.arange(1.0, 5.0)
    assert jax.jit(jax.grad(loss))(2.0, x) == 1 * 12 + 2 * 4 + 3
    assert values(caught("carry")) == [1.0, 4.0, 11.0, 26.0]
    jax.jit(jax.vmap(lambda x: tap.catch(x, "each") and None))(x)
    assert sorted(values(caught("each"))) == [1.0, 2.0, 3.0, 4.0]
    # without jit: grad and vmap trace as well
    jax.grad(lambda x: (tap.catch(x * x, "square"), x**2)[1])(3.0)
    assert values(caught("square")) == [9.0]


def test_can_be_switched_off_while_compiled(pipeline, caught):
    @jax.jit
    def function(x):
        tap.catch(x, "x")
        return x

    pipeline.switch(False)
    function(1.0)
    pipeline.settle()
    pipeline.switch(True)
    function(2.0)
    assert values(caught("x")) == [2.0]


@pytest.mark.slow
def test_training_steps_are_bit_identical(caught):
    model = nn.Sequential([nn.Dense(32), nn.gelu, nn.LayerNorm(), nn.Dense(4)])
    x = batch((16, 8))
    optimizer = optax.sgd(1e-2, momentum=0.9)

    def training(catch):
        def update(params, state, x):
            def loss(params):
                y = model.apply(params, x)
                if catch:
                    tap.catch(y, "output")
                return jnp.mean(y**2)

            value, grads = jax.value_and_grad(loss)(params)
            if catch:
                tap.catch(grads["params"]["layers_0"]["kernel"], "grads")
                tap.catch(value, "loss")
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = parameters(model, x)
        state = optimizer.init(params)
        update = jax.jit(update)
        for _ in range(10):
            params, state = update(params, state, x)
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, state))]

    assert training(True) == training(False)
    assert len(caught("output")) == len(caught("grads")) == len(caught("loss")) == 10


def test_counts_and_logs_errors(pipeline, caught, caplog):
    def broken(value):
        raise RuntimeError("no such thing")

    @jax.jit
    def function(x):
        tap.catch(x, "broken", when=broken)
        tap.catch(jax.random.key(0), "key")
        return x + 1

    with caplog.at_level(logging.WARNING, "tensortap"):
        assert [float(function(i)) for i in (1.0, 2.0)] == [2.0, 3.0]
        assert caught("broken") == []
    assert [("no such thing" in m, "key_data" in m) for m in caplog.messages] == [
        (False, True), (True, False),
    ]  # fmt: skip
    assert pipeline.receipt().reasons["error"] == 3


def test_recomputed_values_are_tagged(caught):
    @jax.checkpoint
    def block(x):
        y = jnp.sin(x)
        tap.catch(y, "y")
        return jnp.sin(y)

    def loss(x):
        return jax.lax.scan(lambda c, _: (block(c), None), x, None, length=2)[0]

    jax.jit(jax.grad(loss))(1.0)
    assert [r.tags for r in caught("y")] == [{}, {}, {"recompute": "1"}, {"recompute": "1"}]
    jax.jit(jax.vmap(jax.grad(block)))(jnp.ones(2))
    assert sum("recompute" in r.tags for r in caught("y")[4:]) == 2


def test_donated_arguments(caught):
    def function(x):
        tap.catch(x, "before")
        y = x + 1
        tap.catch(y, "after")
        return y

    donating = jax.jit(function, donate_argnums=0)
    x = jnp.zeros(3)
    for _ in range(3):
        x = donating(x)
    assert values(caught("before")) == [[i] * 3 for i in range(3)]
    assert values(caught("after")) == [[i] * 3 for i in range(1, 4)]


def test_catches_gradients(caught):
    def square(x):
        return (tap.catch_grad(2 * x, "doubled") ** 2).sum()

    assert jax.grad(square)(3.0) == jax.jit(jax.grad(square))(3.0) == 24.0
    assert values(caught("doubled")) == [12.0, 12.0]
    jax.jit(jax.vmap(jax.grad(square)))(jnp.arange(3.0))
    assert sorted(values(caught("doubled"))[2:]) == [0.0, 4.0, 8.0]
    assert jax.jvp(square, (3.0,), (1.0,)) == (36.0, 24.0)  # no gradient, and no error
    assert len(caught("doubled")) == 5

    @jax.checkpoint
    def block(c, item):
        return tap.catch_grad(c * item, "carry", every=2), None

    function = jax.jit(jax.grad(lambda c, items: jax.lax.scan(block, c, items)[0]))
    assert function(1.0, jnp.array([2.0, 3.0, 4.0, 5.0])) == 120.0
    assert values(caught("carry")) == [1.0, 20.0]  # from the last iteration to the first
    tap.catch_grad([1.0], "a list")
    assert caught("a list") == []
