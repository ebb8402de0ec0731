"""Keras models: layers have their names, and `fit` has a callback."""

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


FIT = """
    from tensortap.integrations.keras import Track
    def fit(track=None, x=np.linspace(-1, 1, 36).reshape(12, 3), **options):
        keras.utils.set_random_seed(0)
        first = keras.layers.Dense(4, activation="tanh", name="a")
        layers = [keras.Input((3,)), first, keras.layers.Dense(1, name="b")]
        model = keras.Sequential(layers, name="net")
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"], **options)
        data = {"x": x, "y": x.sum(1), "batch_size": 4, "shuffle": False, "verbose": 0}
        callbacks = [] if track is None else [track]
        for epochs in (2, 1):
            model.fit(**data, validation_data=(x, x.sum(1)), epochs=epochs, callbacks=callbacks)
            if track is not None:
                rows[id(track)] = rows.get(id(track), []) + track.tracker.records
        return [np.asarray(keras.ops.convert_to_numpy(v.value)) for v in model.variables]

    rows = {}
    track = Track()
    tracked = fit(track)
    records = rows[id(track)]
    size = lambda r: r.stats.max_abs if r.stats else r.value
    fields = lambda r: [r.kind.value, r.name, r.step, r.call, size(r)]
    result["fit"] = [fields(r) for r in records if r.step >= 0]
    result["initial"] = sorted({r.name for r in records if r.step < 0})
    result["same"] = all(a.tobytes() == b.tobytes() for a, b in zip(tracked, fit(), strict=True))
    result["kernel"] = float(np.abs(tracked[0]).max())
    result["unseen"] = track.tracker.unseen
    track = Track(weights=False, optimizer_state=False, every=2, run="runs")
    fit(track)
    result["few"] = [fields(r) for r in tap.open(track.path).records()]
    track = Track(alerts=True, on_alert="stop")
    fit(track, x=np.full((12, 3), np.nan))
    result["stopped"] = [fields(r) for r in rows[id(track)]]
    if keras.config.backend() == "jax":
        track = Track(include="^$")
        fit(track, steps_per_execution=2)
        result["executed"] = [fields(r) for r in rows[id(track)]]
    result["errors"] = tap.receipt().reasons["error"]
    print(json.dumps(result, default=str))
"""


@pytest.fixture(scope="module", params=["jax", "torch"])
def found(request, tmp_path_factory):
    """Return the backend and what a program of it has recorded; a process has one backend."""
    program = (MODELS, JAX, FIT) if request.param == "jax" else (MODELS, FIT)
    environment = {**os.environ, "KERAS_BACKEND": request.param, "TENSORTAP_SERVER": "127.0.0.1:1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", "".join(map(textwrap.dedent, program))],
        env=environment, capture_output=True, text=True, check=False,
        cwd=tmp_path_factory.mktemp("keras"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout.splitlines()[-1])


def test_layers_are_recorded_by_their_paths(found):
    backend, found = found
    if backend == "torch":  # in test_clients.py
        return
    assert found["sequential"]["Activation"] == ["outer.d", "outer.inner.deep", "outer.inner"]
    assert found["functional"]["Activation"] == ["head"]
    assert found["own"]["Activation"] == ["own.first", "own.a", "own.b"]
    for name in ("sequential", "functional", "own"):
        assert sorted(found[name]["Gradient"]) == sorted(found[name]["Activation"])
        assert (found[name]["unseen"], found[name]["errors"]) == ({}, 0)
    assert "no module of Flax" in found["plain"]["unseen"]["<lambda>"]


def test_callback_records_everything_and_changes_nothing(found):
    backend, found = found
    prefix = "net." if backend == "jax" else ""
    assert (found["same"], found["unseen"], found["errors"]) == (True, {}, 0)
    assert bool(found["initial"])
    steps = {}
    sizes = {}
    for kind, name, step, call, size in found["fit"]:
        assert call == 0
        steps.setdefault((kind, name), []).append(step)
        sizes[kind, name, step] = size
    layers = [f"{prefix}a", f"{prefix}b", *(["Sequential"] if backend == "torch" else [])]
    weights = [f"{prefix}{layer}.{part}" for layer in "ab" for part in ("kernel", "bias")]
    want = {(kind, name) for kind in ("Activation", "Gradient") for name in layers}
    want |= {(kind, name) for kind in ("Weight", "Weight_Gradient") for name in weights}
    state = [f"{name}.{part}" for name in weights for part in ("momentum", "velocity")]
    if backend == "jax":
        state += ["optimizer.iteration", "optimizer.learning_rate"]
    want |= {("Optimiser_State", name) for name in state}
    want |= {("Metric", name) for name in ("loss", "mae", "val_loss", "val_mae")}
    assert set(steps) == want
    for (_, name), of_name in steps.items():
        assert of_name == ([2, 5, 8] if name.startswith("val_") else list(range(9))), name
    kernel = f"{prefix}a.kernel"
    assert sizes["Weight", kernel, 8] == pytest.approx(found["kernel"])
    momentum = sizes["Optimiser_State", f"{kernel}.momentum", 0]
    assert sizes["Weight_Gradient", kernel, 0] == pytest.approx(10 * momentum)
    assert sizes["Metric", "loss", 8] < sizes["Metric", "loss", 0]


def test_callback_takes_the_options_of_track(found):
    backend, found = found
    assert {row[0] for row in found["few"]} == {"Activation", "Gradient", "Metric"}
    assert {row[2] for row in found["few"] if row[0] == "Activation"} == {6, 8}  # the second fit
    alerts = [row for row in found["stopped"] if row[0] == "Alert"]
    assert {row[2] for row in alerts} == {0, 1}  # one step of each fit
    if backend == "jax":
        executed = [row[2] for row in found["executed"] if row[1] == "loss"]
        assert executed == list(range(9))
