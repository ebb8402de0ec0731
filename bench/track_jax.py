"""Row on tracked JAX training."""

from __future__ import annotations

import shutil
import time

from bench.harness import Row, in_turns
from bench.runs import _folder, _no_server


def _training(batch=8, length=128, width=256, vocabulary=8192, layers=6):
    """Return a GPT with untied embeddings, its state, and a jitted update."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
            h = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
            return x + nn.Dense(width)(h)

    class GPT(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            places = nn.Embed(length, width, name="places")(jnp.arange(length))
            x = nn.Embed(vocabulary, width)(tokens) + places
            for i in range(layers):
                x = Block(name=f"blocks_{i}")(x)
            return nn.Dense(vocabulary, use_bias=False, name="head")(nn.LayerNorm()(x))

    model, optimizer = GPT(), optax.adamw(1e-3)
    tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, vocabulary)
    params = model.init(jax.random.key(1), tokens)

    def loss(params, tokens):
        logits = model.apply(params, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return losses.mean()

    @jax.jit
    def update(params, state, tokens):
        grads = jax.grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    return update, params, optimizer.init(params), tokens


def track_jax() -> list[Row]:
    import jax

    import tensortap as tap

    _no_server()
    folder = _folder()
    update, params, state, tokens = _training()
    steps, rounds = 3, 11

    def ours() -> float:
        p, s = params, state
        start = time.perf_counter()
        for _ in range(steps):
            p, s, grads = tracker.intercept(update, p, s, tokens)
            tracker.step(p, s, grads)
        jax.block_until_ready(p)
        return (time.perf_counter() - start) / steps

    def base() -> float:
        p, s = params, state
        start = time.perf_counter()
        for _ in range(steps):
            p, s, _ = update(p, s, tokens)
        jax.block_until_ready(p)
        return (time.perf_counter() - start) / steps

    try:
        path = tap.init(folder)
        with tap.track(params, state) as tracker:
            a, b = in_turns(rounds, ours, base)
        assert not tracker.unseen, tracker.unseen
        assert not tap.receipt().dropped
        tap.finish()
        seen = sum(tap.open(path).reader.counts().values()) // (steps * rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    note = f"{seen} tensors per step of {sorted(b)[rounds // 2] * 1e3:.0f} ms"
    return [Row("step of a 6-layer JAX model, all tracked ÷ untracked", 1.5, True, a, b, note=note)]


ROWS = (track_jax,)
