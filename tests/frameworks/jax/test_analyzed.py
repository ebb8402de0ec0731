"""Analyses of a JAX program, against float64."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tensortap as tap
from tensortap.frameworks.jax import activation_samples
from tensortap.record import Kind
from tensortap.stats.activations import evenly_spaced

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


class Layers(nn.Module):
    """Two layers, a dead one, and a loop."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(6, name="up")(x) * jnp.array([1.0, 1, 1, 1, 1, 40])
        x = Scaled(name="scaled")(x)
        Scaled(0.0, name="dead")(x)
        return nn.Dense(2, dtype=jnp.bfloat16, name="down")(x)


class Scaled(nn.Module):
    factor: float = 2.0

    def __call__(self, x):
        return x * self.factor


@pytest.mark.parametrize("most", [1024, 5])
def test_activations(most, monkeypatch):
    monkeypatch.setattr(activation_samples, "ROWS", most)
    model, x = Layers(), jax.random.normal(jax.random.key(0), (3, 4, 4))
    params = model.init(jax.random.key(1), x)
    update = jax.jit(jax.value_and_grad(lambda p, x: jnp.mean(model.apply(p, x) ** 2)))
    expected = update(params, x)
    with tap.track(model_state=params, analyses=True) as tracker:
        found = tracker.intercept(update, params, x)
        tracker.step(params, grads=found[1])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), expected, found))
    outputs = jax.jit(
        lambda p, x: model.apply(p, x, capture_intermediates=True)[1]["intermediates"]
    )(params, x)
    for name in ("scaled", "dead", "down"):
        values = np.asarray(outputs[name]["__call__"][0], np.float64)
        values = values.reshape(-1, values.shape[-1])[evenly_spaced(12, most)]
        numbers = {
            r.tags["quantity"]: r.value
            for r in tracker.records
            if r.kind is Kind.HEALTH and r.tags["of"] == name
        }
        assert numbers["zero_channels"] == (6 if name == "dead" else 0)
        if name == "dead":
            continue
        centered = values - values.mean()
        kurtosis = (centered**4).mean() / (centered**2).mean() ** 2
        assert numbers["kurtosis"] == pytest.approx(kurtosis, rel=1e-12)
        rms = np.sqrt((values**2).mean(0))
        ratio = rms.max() / np.median(rms)
        assert numbers["outlier_ratio"] == pytest.approx(ratio, rel=1e-12)
        assert numbers["outlier_channel"] == rms.argmax()
        sizes = np.linalg.svd(values, compute_uv=False)
        share = sizes / sizes.sum()
        rank = math.exp(-(share * np.log(share)).sum())
        assert numbers["effective_rank"] == pytest.approx(rank, rel=1e-9)
    assert {"noise", "experts"} <= set(tracker.unseen)
    assert "activations" not in tracker.unseen
