"""Intercepted functions: own derivatives, compilation ahead of time, and cached compilation."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tensortap.rooms.track.jax import intercept
from tensortap.rooms.track.jax.intercept import Intercept
from tests.track.jax.programs import (
    ACT,
    GRAD,
    MLP,
    assert_agrees,
    assert_same,
    batch,
    parameters,
    summaries_of,
)

pytestmark = pytest.mark.slow  # each test compiles


def test_custom_vjp():
    model, x = MLP(), batch()
    params = parameters(model, x)

    @jax.custom_vjp
    def halved(y):
        return y

    halved.defvjp(lambda y: (model.apply(params, y), None), lambda _, g: (g[:, :1] * jnp.ones(4),))

    def loss(x):
        return jnp.sum(halved(model.apply(params, x)[:, :1] * jnp.ones(4)) ** 2)

    fn = jax.jit(jax.grad(loss))
    results, seen = Intercept()(fn, x)
    assert_same(results, fn(x))
    summaries = summaries_of(seen)
    outer = model.apply(params, x)
    inner = model.apply(params, outer[:, :1] * jnp.ones(4))
    assert_agrees(summaries[ACT, "MLP", 0], outer, same_program=False)
    assert_agrees(summaries[ACT, "MLP", 1], inner, same_program=False)
    gradient = jnp.zeros((5, 3)).at[:, 0].set(4 * 2 * inner[:, 0])  # as the backward pass has it
    assert_agrees(summaries[GRAD, "MLP", 0], gradient, same_program=False)
    assert (GRAD, "MLP", 1) not in summaries  # inside, the backward pass is the user's own


def test_compiled_functions_say_what_to_pass():
    model, x = MLP(), batch()
    params = parameters(model, x)
    compiled = jax.jit(model.apply).lower(params, x).compile()
    ours = Intercept()
    results, seen = ours(compiled, params, x)
    assert_same(results, compiled(params, x))
    assert seen == []
    (reason,) = ours.unseen.values()
    assert reason.startswith("not observed: it has been compiled with jit(f).lower().compile(); ")


@pytest.fixture
def cache(tmp_path):
    """Give JAX an empty persistent cache of compiled functions."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    compilation_cache.reset_cache()
    for name, value in options.items():
        jax.config.update(name, value)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_persistent_compilation_cache(cache, monkeypatch):
    """A function that is traced anew gets its compiled code from the cache."""
    model, x = MLP(), batch()
    params = parameters(model, x)
    found = []
    for _ in range(2):
        monkeypatch.setattr(intercept, "_keys", itertools.count())  # as in a new process
        fn = jax.jit(jax.grad(lambda params, x: jnp.mean(model.apply(params, x) ** 2)))
        results, seen = Intercept()(fn, params, x)
        assert_same(results, fn(params, x))
        found.append((summaries_of(seen), {path.name for path in cache.glob("*-cache")}))
    assert found[0] == found[1]
    assert len(found[0][0]) == 6
    assert len(found[0][1]) == 2  # the function, and the one with the statistics
