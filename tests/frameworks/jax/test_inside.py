"""Compiled programs inside functions that are not compiled: the same bits, and all is seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.extend.core import primitives

from tensortap.frameworks.jax import inside as jax_inside
from tensortap.frameworks.jax.intercept import Intercept

dense = nn.Dense(4)
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
PARAMS = dense.init(jax.random.key(0), X)

layer = jax.jit(lambda x: jnp.tanh(dense.apply(PARAMS, x)))


def jitted(x):
    return layer(layer(x))


def scanned(x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(dense.apply(PARAMS, c)), c.sum()), x, None, 3)


def looped(x):
    body = lambda c: (c[0] + 1, jnp.tanh(dense.apply(PARAMS, c[1])))
    return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x))


def branched(x):
    return jax.lax.cond(x.sum() > 1e9, lambda x: x, lambda x: dense.apply(PARAMS, x), x)


def differentiated(x):
    return jax.value_and_grad(lambda x: scanned(layer(x))[0].sum())(x)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def seen_by(intercept, fn, x=X):
    results, seen = intercept(fn, x)
    return results, sorted((o.kind.value, o.call) for o in seen if o.resolve() is not None)


ALL = [
    (jitted, [("Activation", 0), ("Activation", 1)]),
    (scanned, [("Activation", n) for n in range(3)]),
    (looped, [("Activation", n) for n in range(3)]),
    (branched, [("Activation", 0)]),
    (differentiated, [(k, n) for k in ("Activation", "Gradient") for n in range(4)]),
]


@pytest.mark.parametrize(("fn", "calls"), ALL)
def test_the_same_bits_and_all_is_seen(fn, calls):
    want = bits(fn(X))
    intercept = Intercept()
    for _ in range(2):  # the second time without a comparison
        results, seen = seen_by(intercept, fn)
        assert bits(results) == want
        assert seen == calls


def test_jax_is_left_as_it_was():
    from jax._src import pjit

    before = primitives.scan_p.impl, primitives.while_p.impl, pjit._pjit_call_impl_python

    def broken(x):
        assert primitives.scan_p.impl is not before[0]
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Intercept()(broken, X)
    assert before == (
        primitives.scan_p.impl, primitives.while_p.impl, pjit._pjit_call_impl_python,
    )  # fmt: skip


def test_what_rounds_differently_runs_twice(monkeypatch):
    monkeypatch.setattr(jax_inside, "identical", lambda a, b: False)
    want = bits(scanned(X))
    intercept = Intercept()
    for _ in range(2):
        results, seen = seen_by(intercept, scanned)
        assert bits(results) == want
        assert len(seen) == 3
    assert len(intercept.unseen) == 1
    assert "scan(): with statistics in it" in intercept.unseen[0]


@pytest.mark.parametrize("where", ["__init__", "marked"])
def test_what_cannot_be_opened_still_runs(monkeypatch, where):
    def fail(*args, **kwargs):
        raise RuntimeError("not today")

    monkeypatch.setattr(
        *((jax_inside._Program, "__init__") if where == "__init__" else (jax_inside, "run_opened")),
        fail,
    )
    intercept = Intercept()
    results, _ = intercept(scanned, X)
    assert [leaf.shape for leaf in jax.tree.leaves(results)] == [(3, 4), (3,)]
    assert "not today" in intercept.unseen[0]


def test_effects_happen_once():
    told = []

    def body(c, _):
        jax.debug.callback(lambda v: told.append(float(v)), c.sum())
        return jnp.tanh(dense.apply(PARAMS, c)), None

    _, seen = seen_by(Intercept(), lambda x: jax.lax.scan(body, x, None, 2)[0])
    jax.effects_barrier()
    assert len(told) == 2
    assert seen == [("Activation", 0), ("Activation", 1)]
