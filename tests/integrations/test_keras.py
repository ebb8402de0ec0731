"""The callback for `fit` of Keras on torch, and the names of its layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

FIT = """
    import json, keras, numpy as np, tensortap as tap
    from tensortap.rooms.integrations.keras import Track
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="block")
            self.inner = keras.layers.Dense(4, activation="tanh", name="registered")
            self.others = [keras.layers.Dense(4, name="listed")]

        def call(self, x):
            return self.others[0](self.inner(x))

    def fit(track=None, x=np.linspace(-1, 1, 36).reshape(12, 3), **options):
        keras.utils.set_random_seed(0)
        layers = [keras.Input((3,)), Block(), keras.layers.Dense(1, name="b")]
        model = keras.Sequential(layers, name="net")
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"], **options)
        data = {"x": x, "y": x.sum(1), "batch_size": 4, "shuffle": False, "verbose": 0}
        callbacks = [] if track is None else [track]
        for epochs in (2, 1):
            model.fit(**data, validation_data=(x, x.sum(1)), epochs=epochs, callbacks=callbacks)
            if track is not None:
                rows[id(track)] = rows.get(id(track), []) + track.tracker.records
        return [np.asarray(keras.ops.convert_to_numpy(v.value)) for v in model.variables]

    rows, result = {}, {}
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
    track = Track(kind=("activation", "gradient"), every=2, run="runs")
    fit(track)
    result["few"] = [fields(r) for r in tap.open(track.path).records()]
    track = Track(alerts=True, on_alert="stop")
    fit(track, x=np.full((12, 3), np.nan))
    result["stopped"] = [fields(r) for r in rows[id(track)]]
    result["errors"] = tap.receipt().reasons["error"]
    from tensortap.rooms.integrations import keras as callbacks
    callbacks.config = type("Config", (), {"backend": staticmethod(lambda: "jax")})
    try:
        Track()
    except tap.TensortapError as error:
        result["rejected"] = str(error)
    print(json.dumps(result, default=str))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what a program has recorded, in a process of its own: it has one backend."""
    environment = {**os.environ, "KERAS_BACKEND": "torch", "TENSORTAP_SERVER": "127.0.0.1:1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FIT)], env=environment, capture_output=True,
        text=True, check=False, cwd=tmp_path_factory.mktemp("keras"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_callback_records_everything_and_changes_nothing(found):
    assert (found["same"], found["unseen"], found["errors"]) == (True, {}, 0)
    assert bool(found["initial"])
    steps = {}
    sizes = {}
    for kind, name, step, call, size in found["fit"]:
        assert call == 0
        steps.setdefault((kind, name), []).append(step)
        sizes[kind, name, step] = size
    layers = ["block.inner", "block.listed", "block", "b", "Sequential"]
    own = [layers[0], layers[1], "b"]
    weights = [f"{layer}.{part}" for layer in own for part in ("kernel", "bias")]
    want = {(kind, name) for kind in ("Activation", "Gradient") for name in layers}
    want |= {(kind, name) for kind in ("Weight", "Weight_Gradient") for name in weights}
    state = [f"{name}.{part}" for name in weights for part in ("momentum", "velocity")]
    want |= {("Optimiser_State", name) for name in state}
    want |= {("Metric", name) for name in ("loss", "mae", "val_loss", "val_mae")}
    assert set(steps) == want
    for (_, name), of_name in steps.items():
        assert of_name == ([2, 5, 8] if name.startswith("val_") else list(range(9))), name
    assert sizes["Weight", "block.inner.kernel", 8] == pytest.approx(found["kernel"])
    momentum = sizes["Optimiser_State", "block.inner.kernel.momentum", 0]
    assert sizes["Weight_Gradient", "block.inner.kernel", 0] == pytest.approx(10 * momentum)
    assert sizes["Metric", "loss", 8] < sizes["Metric", "loss", 0]


def test_callback_takes_the_options_of_track(found):
    assert {row[0] for row in found["few"]} == {"Activation", "Gradient", "Metric"}
    assert {row[2] for row in found["few"] if row[0] == "Activation"} == {6, 8}  # the second fit
    alerts = [row for row in found["stopped"] if row[0] == "Alert"]
    assert {row[2] for row in alerts} == {0, 1}  # one step of each fit
    assert found["rejected"].startswith("the Keras callback needs the torch backend, this is jax")
