"""Keras models on JAX: layers have their names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

MODELS = """
    import json, logging, keras, numpy as np, tensortap as tap
    keras.utils.set_random_seed(0)

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(4, name="first")
            self.blocks = [keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")]
        def call(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x

    inner = keras.Sequential([keras.layers.Dense(3, name="deep")], name="inner")
    sequential = keras.Sequential([keras.layers.Dense(4, name="d"), inner], name="outer")
    source = keras.Input((3,))
    functional = keras.Model(source, keras.layers.Dense(2, name="head")(source))
    models = {"sequential": sequential, "functional": functional, "own": Own()}
    x = np.ones((2, 3), "float32")
    for model in models.values():
        model(x)

    def found(tracker):
        kinds = ("Activation", "Gradient", "Weight", "Weight_Gradient")
        rows = {kind: [r.name for r in tracker.records if r.kind.value == kind] for kind in kinds}
        return {**rows, "unseen": tracker.unseen, "errors": tap.receipt().reasons["error"]}

    result = {}
"""

JAX = """
    import jax, jax.numpy as jnp
    for name, model in models.items():
        state = {v.path.replace("/", "."): v.value for v in model.trainable_variables}
        def loss(state, x):
            values = [state[v.path.replace("/", ".")] for v in model.trainable_variables]
            return jnp.mean(model.stateless_call(values, [], x)[0] ** 2)
        def update(state, x):
            return jax.grad(loss)(state, x)
        with tap.track(model_state=state) as tracker:
            grads = tracker.intercept(jax.jit(update), state, x)
            tracker.step(state, grads=grads)
        result[name] = found(tracker)
    with tap.track(model_state=state) as tracker:
        tracker.intercept(jax.jit(lambda x: x + 1), x)
    result["plain"] = found(tracker)
    print(json.dumps(result))
"""


def test_layers_are_recorded_by_their_paths():
    text = textwrap.dedent(MODELS) + textwrap.dedent(JAX)
    environment = {**os.environ, "KERAS_BACKEND": "jax", "TENSORTAP_SERVER": "127.0.0.1:1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sequential"]["Activation"] == ["outer.d", "outer.inner.deep", "outer.inner"]
    assert found["functional"]["Activation"] == ["head"]
    assert found["own"]["Activation"] == ["own.first", "own.a", "own.b"]
    for name in ("sequential", "functional", "own"):
        assert sorted(found[name]["Gradient"]) == sorted(found[name]["Activation"])
        assert (found[name]["unseen"], found[name]["errors"]) == ({}, 0)
    assert "no module of Flax, Equinox or Keras" in found["plain"]["unseen"]["<lambda>"]
