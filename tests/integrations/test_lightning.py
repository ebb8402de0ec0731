"""The callback in real Lightning trainings, under both names of the library."""

from __future__ import annotations

import pickle
import sys

import pytest
import torch

import tensortap as tap
from tensortap.capture.pipeline import pipeline
from tensortap.core.record import Kind

# raised by Lightning about torch's pytree
IGNORED = r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(IGNORED)]
BATCHES = 6


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Import what takes seconds where a test needs it: every worker collects all files."""
    global lightning, pytorch_lightning, Track
    import lightning.pytorch
    import pytorch_lightning

    from tensortap.rooms.integrations.lightning import Track


def model_class(library):
    class Model(library.LightningModule):
        fails_at = None

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))

        def training_step(self, batch, batch_idx):
            if self.global_step == self.fails_at:
                raise ZeroDivisionError("raised by the user")
            x, y = batch
            loss = torch.nn.functional.mse_loss(self.layers(x), y)
            self.log("train/mse", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val/mse", torch.nn.functional.mse_loss(self.layers(x), y))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Model


def loader():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCHES * 5, 4, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), batch_size=5)


def fit(folder, *callbacks, library=None, model=None, ckpt_path=None, **options):
    options = {
        "max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": folder, **options,
    }  # fmt: skip
    torch.manual_seed(0)
    library = library or lightning.pytorch
    model = model or model_class(library)()
    trainer = library.Trainer(callbacks=list(callbacks), **options)
    trainer.fit(model, loader(), loader(), ckpt_path=ckpt_path)
    return trainer, model


def steps(tracker, kind, name):
    records = (r for r in tracker.records if "initial" not in r.tags)
    return [r.step for r in records if r.kind is kind and r.name == name]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_records_have_the_step_of_the_optimizer(tmp_path, package):
    """Lightning computes gradients inside `optimizer.step` and zeroes them in the next one."""
    library, seen = sys.modules[package], []

    class Look(library.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            seen.append(pl_module.layers[0].weight.grad.abs().max().item())

    track = Track()
    _, model = fit(tmp_path, track, Look(), library=library)
    every = list(range(2 * BATCHES))
    for kind, name in [
        (Kind.ACTIVATION, "layers.0"),
        (Kind.GRADIENT, "layers.0"),
        (Kind.WEIGHT, "layers.0.weight"),
        (Kind.WEIGHT_GRADIENT, "layers.0.weight"),
        (Kind.OPTIMISER_STATE, "layers.0.weight.exp_avg"),
        (Kind.METRIC, "loss"),
        (Kind.METRIC, "train/mse_step"),
    ]:
        assert steps(track.tracker, kind, name) == every, (kind, name)
    # metrics of an epoch, and of a validation, belong to the last step of the epoch
    assert steps(track.tracker, Kind.METRIC, "train/mse_epoch") == [BATCHES - 1, 2 * BATCHES - 1]
    assert steps(track.tracker, Kind.METRIC, "val/mse") == [BATCHES - 1, 2 * BATCHES - 1]
    metrics = track.tracker.metrics().set_index("step")
    assert (metrics["loss"] == metrics["train/mse_step"]).all()
    found = (r for r in track.tracker.records if r.kind is Kind.WEIGHT_GRADIENT)
    assert [r.stats.max_abs for r in found if r.name == "layers.0.weight"] == seen
    assert not any(module._forward_hooks for module in model.modules())


def test_accumulated_batches_are_one_step(tmp_path):
    track = Track()
    trainer, _ = fit(tmp_path, track, accumulate_grad_batches=2)
    records = list(track.tracker.records)
    calls = [(r.step, r.call) for r in records if r.kind is Kind.ACTIVATION and r.name == "layers"]
    assert calls == [(step, call) for step in range(BATCHES) for call in range(2)]
    assert steps(track.tracker, Kind.WEIGHT, "layers.0.weight") == list(range(trainer.global_step))
    # the loss of a step is the mean of its batches
    logged = track.tracker.metrics()
    assert len(logged) == BATCHES
    assert logged["loss"].notna().all()


def test_training_is_bit_identical(tmp_path):
    fit(tmp_path)
    without, tracked = (
        fit(tmp_path, *callbacks)[1].state_dict() for callbacks in ([], [Track(alerts=True)])
    )
    assert all(torch.equal(parameter, tracked[name]) for name, parameter in without.items())


def test_opens_a_run(tmp_path):
    track = Track(run=tmp_path / "runs", every=3, kind=("gradient", "weight", "weight_gradient"))
    fit(tmp_path, track)
    run = tap.open(track.path)
    assert run.reader.info.ended is not None
    frame = run.logframe()
    assert sorted(frame.metadata.step.unique()) == [-1, 0, 3, 6, 9]  # the first: initial weights
    assert "Activation" not in set(frame.metadata.tensor_type)
    assert set(run.metrics().columns) >= {"loss", "val/mse"}
    assert len(list(track.tracker.records)) > len(frame)


def test_second_fit_starts_at_step_0_unless_it_resumes(tmp_path):
    track = Track()
    for _ in range(2):
        trainer, _ = fit(tmp_path, track, max_epochs=1)
        assert steps(track.tracker, Kind.WEIGHT, "layers.0.weight") == list(range(BATCHES))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(tmp_path, track, ckpt_path=tmp_path / "half.ckpt")
    expected = list(range(BATCHES, 2 * BATCHES))
    assert steps(track.tracker, Kind.WEIGHT, "layers.0.weight") == expected
    assert steps(track.tracker, Kind.METRIC, "loss") == expected


def test_manual_optimization_with_several_optimizers(tmp_path):
    class ByHand(model_class(lightning.pytorch)):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            x, y = batch
            for optimizer in self.optimizers():
                loss = torch.nn.functional.mse_loss(self.layers(x), y)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return {"loss": loss}

        def configure_optimizers(self):
            return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in self.layers]

    track = Track()
    fit(tmp_path, track, model=ByHand(), max_epochs=1)
    for name in ("layers.0.weight", "layers.1.weight"):
        assert sorted(set(steps(track.tracker, Kind.WEIGHT, name))) == list(range(BATCHES))
        assert set(steps(track.tracker, Kind.WEIGHT_GRADIENT, name)) == set(range(BATCHES))
    assert steps(track.tracker, Kind.METRIC, "loss") == list(range(BATCHES))


def test_exception_passes_and_hooks_are_removed(tmp_path):
    model = model_class(lightning.pytorch)()
    model.fails_at = 3
    track = Track(run=tmp_path / "runs")
    with pytest.raises(ZeroDivisionError, match="raised by the user"):
        fit(tmp_path, track, model=model)
    assert not any(module._forward_hooks for module in model.modules())
    run = tap.open(track.path)
    assert run.reader.info.ended is not None
    weights = run.reader.records("layers.0.weight", kind=Kind.WEIGHT)
    assert [r.step for r in weights] == [-1, 0, 1, 2]


def test_internal_errors_do_not_reach_the_training_unless_strict(tmp_path, monkeypatch):
    errors = tap.receipt().reasons["error"]
    monkeypatch.setattr(
        "tensortap.rooms.integrations.training.track", lambda *_, **__: 1 / 0
    )  # the beginning
    track = Track(run=tmp_path / "runs")
    trainer, _ = fit(tmp_path, track)
    assert trainer.global_step == 2 * BATCHES
    assert track.tracker is None
    assert tap.open(track.path).reader.info.ended is not None
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "strict", True)
        with pytest.raises(ZeroDivisionError):
            fit(tmp_path, Track())
    monkeypatch.undo()
    monkeypatch.setattr("tensortap.rooms.track.observer.Observer.advance", lambda _: 1 / 0)
    trainer, _ = fit(tmp_path, Track(run=tmp_path / "runs"))
    assert trainer.global_step == 2 * BATCHES
    assert tap.receipt().reasons["error"] > errors


def test_alert_stops_the_training(tmp_path):
    def always(record, memory):
        return "enough" if record.kind is Kind.WEIGHT and record.step == 2 else None

    track = Track(alerts=[always], on_alert="stop")
    trainer, _ = fit(tmp_path, track)
    assert trainer.global_step == 3
    assert track.tracker.alerts


def test_rejects_unknown_options():
    with pytest.raises(TypeError, match="track has no option evry; its options are alerts"):
        Track(evry=3)


def test_is_a_callback_of_both_names_and_can_be_pickled():
    assert tap.rooms.integrations.lightning.Track is Track
    assert issubclass(Track, (lightning.pytorch.Callback, pytorch_lightning.Callback))
    assert pickle.loads(pickle.dumps(Track(every=3)))._options == {"every": 3}
