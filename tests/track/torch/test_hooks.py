"""Hooks on models that are copied, pickled, kept, in eval() mode, or partly not called."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.core.record import Kind
from tensortap.rooms.track.torch.hooks import ModuleHook
from tensortap.rooms.track.torch.outputs import GENERATED

pytestmark = pytest.mark.usefixtures("no_errors")
ACT, GRAD = Kind.ACTIVATION, Kind.GRADIENT
X = torch.ones(5, 4)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def hooks_in(model):
    return [
        hook
        for module in model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        for hook in table.values()
    ]


def reloaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# -- copies and pickles --------------------------------------------------------------------


COPIES = {
    "deepcopy": copy.deepcopy,
    "torch.save": reloaded,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "average": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


@pytest.mark.parametrize("way", COPIES)
def test_hooks_of_copies_do_nothing(way, found):
    model = mlp()
    with tap.track(model) as tracker:
        model(X).sum().backward()
        copied = COPIES[way](model)
        assert not any(isinstance(hook, ModuleHook) for hook in hooks_in(copied))
        assert torch.equal(copied(X), model.eval()(X))
        copied(X).sum().backward()
        tracker.step()
    assert [r.call for r in found(tracker).of(ACT, "2")] == [0]


@pytest.mark.slow
def test_saved_models_load_without_tensortap(tmp_path):
    model = nn.Sequential(nn.Linear(4, 2))
    with tap.track(model):
        torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch; sys.modules['tensortap'] = None;"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False);"
        "print(model(torch.ones(1, 4)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "torch.Size([1, 2])", done.stderr


def test_outputs_can_be_saved_while_tracked(recwarn):
    model = mlp()
    with tap.track(model, alerts=True):
        torch.save(model(X), io.BytesIO())
    assert not recwarn.list


# -- what keeps the model alive ------------------------------------------------------------


class KeepsItsOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.kept = None

    def forward(self, x):
        self.kept = self.fc(x)
        return self.kept.view(-1) * 2


@pytest.mark.parametrize("training", [True, False])
def test_model_that_keeps_an_output_is_freed(training):
    model = KeepsItsOutput().train(training)
    alive = weakref.ref(model)
    with tap.track(model, alerts=True) as tracker:
        for _ in range(2):
            model(X).sum().backward()
            tracker.step()
    del model
    gc.collect()
    assert alive() is None


# -- eval() --------------------------------------------------------------------------------


def test_model_that_is_trained_in_eval_mode_is_named(found, caplog):
    model = mlp().eval()
    with tap.track(model) as tracker:
        for _ in range(2):
            model(X).sum().backward()
            tracker.step()
    assert "pass only_training=False" in tracker.unseen["Sequential"]
    assert sum("eval() mode" in record.message for record in caplog.records) == 1
    assert not found(tracker).of(ACT)
    with tap.track(model) as tracker:
        model(X)  # a validation within a step that trains
        model.train()(X).sum().backward()
        tracker.step()
    assert not tracker.unseen


# -- weights without a call ----------------------------------------------------------------


class Unusual(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.direct = nn.Linear(4, 4)
        self.embed = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight  # tied: its owner is called
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scales = nn.ParameterList([torch.ones(4)])
        self.late = nn.Linear(4, 4)
        self.steps = 0

    def forward(self, x):
        x = self.embed(x)
        x = self.attention(x, x, x)[0] * self.scales[0]
        x = nn.functional.linear(x, self.frozen.weight)
        if self.steps:
            x = self.late(x)
        self.steps += 1
        return nn.functional.linear(nn.functional.linear(x, self.direct.weight), self.head.weight)


@pytest.mark.slow
@pytest.mark.parametrize("given", [True, False])
def test_reports_modules_whose_weight_is_used_without_calling_them(given, open_run):
    model = Unusual()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.track(model, optimizer=opt if given else None) as tracker:
        for _ in range(3):
            model(torch.arange(4)).sum().backward()
            opt.step()
            opt.zero_grad()
            tracker.step()
    assert set(tracker.unseen) == {"direct"}
    assert "not called" in tracker.unseen["direct"]
    tap.flush()
    alerts = [alert.name for alert in tap.open(open_run).alerts() if alert.rule == "unseen"]
    assert alerts == ["direct"]


# -- passes without gradients --------------------------------------------------------------


def test_passes_without_gradients_are_tagged(found):
    model = mlp()

    @torch.no_grad()
    def generate():
        model(X)

    with tap.track(model) as tracker:
        generate()
        with torch.inference_mode():
            model(X)
        model(X).sum().backward()
        tracker.step()
    assert [r.tags for r in found(tracker).of(ACT, "2")] == [
        {"mode": "generate"},
        {"mode": "no_grad"},
        {},
    ]
    # generation does not change the calls of the other passes
    assert [r.call for r in found(tracker).of(ACT, "2")] == [GENERATED, 0, 1]
    assert [r.call for r in found(tracker).of(GRAD, "2")] == [1]
