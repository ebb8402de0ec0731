"""Analyses of a JAX program, against float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tensortap as tap
from tensortap.record import Kind

pytestmark = pytest.mark.usefixtures("no_errors")


def norm(tree):
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return math.sqrt(sum(float(leaf @ leaf) for leaf in leaves))


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"])


def start():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": {"kernel": jax.random.normal(keys[0], (4, 8))},
        "down": {"kernel": jax.random.normal(keys[1], (8, 2))},
    }
    return params, jax.random.normal(keys[2], (5, 4))


def test_norms_and_updates_between_two_states():
    params, x = start()
    initial = tap.summarize(np.asarray(params["up"]["kernel"]))
    states, gradients = [params], []
    with tap.track(model_state=params, every=2, analyses=["norms", "updates"]) as tracker:
        for _ in range(5):
            gradients.append(jax.grad(loss)(params, x))
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients[-1])
            states.append(params)
            tracker.step(params, grads=gradients[-1])
    found = {r.name: r.value for r in tracker.records if r.kind is Kind.HEALTH and r.step == 4}
    moved = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), states[5], states[4])
    before = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), states[3], states[2])
    exact = {"rel": 1e-12}
    assert found["model.grad_norm"] == pytest.approx(norm(gradients[4]), **exact)
    assert found["up.kernel.grad_norm"] == pytest.approx(norm(gradients[4]["up"]), **exact)
    assert found["model.weight_norm"] == pytest.approx(norm(states[5]), **exact)
    assert found["model.update_norm"] == pytest.approx(norm(moved), **exact)
    a, b = moved["up"]["kernel"].ravel(), before["up"]["kernel"].ravel()
    cosine = float(a @ b) / norm(a) / norm(b)
    assert found["up.kernel.update_cosine"] == pytest.approx(cosine, rel=1e-12)
    a, b = (np.asarray(gradients[n]["up"]["kernel"], np.float64).ravel() for n in (4, 2))
    assert found["up.kernel.grad_cosine"] == pytest.approx(
        float(a @ b) / norm(a) / norm(b), rel=1e-12
    )
    first = [r for r in tracker.records if r.kind is Kind.WEIGHT and r.step == -1]
    assert {r.name for r in first} == {"up.kernel", "down.kernel"}
    assert next(r for r in first if r.name == "up.kernel").stats.rm2 == pytest.approx(initial.rm2)


def test_weights_that_were_donated_have_no_updates():
    params, x = start()
    step = jax.jit(
        lambda p, x: jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p, x)),
        donate_argnums=0,
    )
    with tap.track(model_state=params, analyses=["updates"]) as tracker:
        params = step(params, x)
        tracker.step(params)
    assert not [r for r in tracker.records if r.kind is Kind.HEALTH]
    assert "donated" in tracker.unseen["updates"]
