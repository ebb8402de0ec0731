"""Logits of attention in JAX programs, from samples of queries and keys."""

import math

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import tensortap as tap  # noqa: E402

CLOSE = 1e-12
SEEN = np.random.default_rng(0).random((2, 1, 9, 9)) < 0.6
SEEN[..., 0] = True


class Attend(nn.Module):
    """Projections, and the attention of jax.nn."""

    options: dict

    @nn.compact
    def __call__(self, x):
        q = nn.DenseGeneral((4, 8), name="query")(x)
        k = nn.DenseGeneral((2, 8), name="key")(x)
        self.sow("kept", "q", q)
        self.sow("kept", "k", k)
        return jax.nn.dot_product_attention(q, k, k, **self.options)


class Model(nn.Module):
    options: dict

    @nn.compact
    def __call__(self, x):
        return Attend(self.options, name="attend")(x).mean()


def numbers(tracker, name):
    found = [r for r in tracker.records if r.kind == "Health" and r.tags["of"] == name]
    return {record.tags["quantity"]: record.value for record in found}


def plain(q, k, scale, mask):
    """Return the largest logit and the mean entropy per head, in float64."""
    q, k = (np.asarray(each, np.float64) for each in (q, k))
    logits = np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, q.shape[2] // k.shape[2], 2)) * scale
    logits = np.where(mask, logits, -np.inf)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
    return logits.max((0, 2, 3)), entropy.mean((0, 2))


@pytest.mark.parametrize(
    ("options", "scale", "mask"),
    [
        ({"is_causal": True}, 1 / math.sqrt(8), np.tril(np.ones((9, 9), bool))),
        ({"scale": 0.25, "mask": SEEN}, 0.25, SEEN),
    ],
)
def test_attention_of_jax(options, scale, mask):
    model = Model(options)
    x = jax.random.normal(jax.random.key(0), (2, 9, 16))
    params = model.init(jax.random.key(1), x)["params"]
    grad = jax.jit(jax.value_and_grad(lambda p, x: model.apply({"params": p}, x)))
    expected = grad(params, x)
    with tap.track(model_state=params, analyses=["attention"]) as tracker:
        found = tracker.intercept(grad, params, x)
        tracker.step(params, found[1])
    same = jax.tree.map(lambda a, b: bool((a == b).all()), expected, found)
    assert jax.tree.all(same)
    kept = model.apply({"params": params}, x, mutable="kept")[1]["kept"]["attend"]
    largest, entropy = plain(kept["q"][0], kept["k"][0], scale, mask)
    row = numbers(tracker, "attend")
    np.testing.assert_allclose([row[f"max_logit_{h}"] for h in range(4)], largest, rtol=1e-5)
    np.testing.assert_allclose([row[f"entropy_{h}"] for h in range(4)], entropy, rtol=1e-5)
    assert not hasattr(jax.nn.dot_product_attention, "__wrapped__")


def test_logits_of_a_sample_are_exact():
    from tensortap.frameworks.jax.attention import _sample

    q, k = (jax.random.normal(jax.random.key(i), (2, 9, 4 >> i, 8)) for i in range(2))
    sample, values = _sample(q, k, mask=jnp.asarray(SEEN), scale=0.25)
    logits = sample.logits(np.asarray(values).view(np.uint32))
    want = np.einsum(
        "bqhd,bkhd->bhqk", np.asarray(q, np.float64), np.repeat(np.asarray(k, np.float64), 2, 2)
    )
    want = np.where(SEEN, want * 0.25, -np.inf)
    np.testing.assert_allclose(logits, want, rtol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_attention_of_flax(library):
    x = jax.random.normal(jax.random.key(0), (2, 9, 16))
    if library == "linen":
        layer = nn.MultiHeadDotProductAttention(num_heads=4)
        params = layer.init(jax.random.key(1), x)["params"]
        step = jax.jit(lambda p, x: layer.apply({"params": p}, x).sum())
        name, (query, key) = "MultiHeadDotProductAttention", (params["query"], params["key"])
        kernels = [(each["kernel"], each["bias"]) for each in (query, key)]
    else:
        from flax import nnx

        module = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))
        graph, params = nnx.split(module)
        step = jax.jit(lambda p, x: nnx.merge(graph, p)(x).sum())
        name = "MultiHeadAttention"
        kernels = [(each.kernel[...], each.bias[...]) for each in (module.query, module.key)]
    with tap.track(model_state=params, analyses=["attention"]) as tracker:
        tracker.intercept(step, params, x)
        tracker.step(params)
    q, k = (jnp.einsum("btd,dhw->bthw", x, w) + b for w, b in kernels)
    largest, entropy = plain(q, k, 0.5, np.ones((9, 9), bool))
    row = numbers(tracker, name)
    np.testing.assert_allclose([row[f"max_logit_{h}"] for h in range(4)], largest, rtol=1e-4)
    np.testing.assert_allclose([row[f"entropy_{h}"] for h in range(4)], entropy, rtol=1e-4)
