"""The black box of a JAX program: the state and the random keys are arguments of its step."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import tensortap as tap
from tensortap.rooms.blackbox.explaining import DATA, DETERMINISTIC

jax = pytest.importorskip("jax")
jnp = jax.numpy
STEPS, FAULTY = 9, 6


class Program:
    """Momentum and dropout, with a compiled step that donates its state."""

    def __init__(self, fault=""):
        self.fault = fault
        self.once = [1.0]
        self.update = jax.jit(self.compute, donate_argnums=(0,))
        self.step = self.train

    def compute(self, state, x, key, factor):
        def loss_of(params):
            kept = jax.random.bernoulli(key, 0.9, x.shape)
            h = jnp.tanh((x * kept) @ params["w"]) + params["b"]
            if self.fault == "code":
                h = jnp.where(state["count"] < FAULTY, h, jnp.log(-jnp.abs(h) - 1))
            return factor * jnp.square(h).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        add = functools.partial(jax.tree.map, lambda m, g: 0.9 * m + g)
        momentum = add(state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum, "count": state["count"] + 1}, loss

    def train(self, state, x, key):
        factor = 1.0
        if self.fault == "once" and state["count"] == FAULTY and self.once:
            factor = self.once.pop() * np.nan
        return self.update(state, x, key, factor)

    def run(self):
        key = jax.random.key(0)
        params = {"w": jnp.full((4, 3), 0.1), "b": jnp.zeros(3)}
        zeros = jax.tree.map(jnp.zeros_like, params)
        state = {"params": params, "momentum": zeros, "count": jnp.array(0)}
        losses = []
        for number in range(STEPS):
            key, own = jax.random.split(key)
            x = np.array(jax.random.normal(own, (6, 4)))
            if self.fault == "data" and number == FAULTY:
                x[2] = np.nan
            state, loss = self.step(state, x, own)
            losses.append(np.asarray(loss).tobytes())
        return losses, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def boxed(fault=""):
    expected = Program(fault).run()
    program = Program(fault)
    box = program.step = tap.blackbox(program.train, every=4)
    assert program.run() == expected
    return box


def test_data():
    box = boxed("data")
    assert 0 < box.nbytes < 4096  # a copy of the state, and batches without it
    verdict = box.verdicts[0]
    assert (verdict.kind, verdict.step, verdict.rows) == (DATA, FAULTY, (2,)), verdict
    assert verdict.same


def test_code():
    verdict = boxed("code").verdicts[0]
    assert (verdict.kind, verdict.step) == (DETERMINISTIC, FAULTY), verdict
    assert verdict.finding.operation == "log"
    assert verdict.finding.line.file == __file__
    assert "log of" in verdict.text


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="state of a JAX program is in the arguments"):
        tap.blackbox(print, None, "adam")
