"""Hooks on models that are copied, pickled, kept, in eval() mode, or partly not called."""

import copy
import copyreg
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
    "copy": copy.copy,
    "torch.save": reloaded,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "average": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_have_no_hooks(way, found):
    model = mlp()
    calls = []
    model[0].register_forward_hook(_OwnHook(calls))
    with tap.track(model) as tracker:
        model(X).sum().backward()
        copied = COPIES[way](model)
        if way != "copy":  # of which torch's own contract is that it shares its modules
            assert [type(hook) for hook in hooks_in(copied)] == [_OwnHook]
        assert not any(isinstance(hook, ModuleHook) for hook in copied._forward_hooks.values())
        if way != "copy":
            copied(X).sum().backward()
        tracker.step()
    copied(X)
    assert [r.call for r in found(tracker).of(ACT, "2")] == [0]
    assert len(hooks_in(model)) == 1
    assert not {nn.Linear, nn.ReLU, nn.Sequential} & set(copyreg.dispatch_table)


class _OwnHook:
    """A hook of the user, which copies and pickles keep."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, module, args, output):
        self.calls.append(1)


class CopiesItself(nn.Module):
    """Copies and pickles its attributes in a way of its own."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x)

    def __deepcopy__(self, memo):
        new = self.__new__(type(self))
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new

    def __reduce__(self):
        return _make, (self.__dict__,)


def _make(attributes):
    new = CopiesItself.__new__(CopiesItself)
    new.__dict__ = attributes
    return new


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_hooks_of_modules_that_copy_themselves_do_nothing(way, found):
    model = CopiesItself()
    with tap.track(model) as tracker:
        copied = COPIES[way](model)
        assert torch.equal(copied(X), model(X))
        tracker.step()
    assert [r.call for r in found(tracker).of(ACT, "CopiesItself")] == [0]
    assert not any(isinstance(hook, ModuleHook) for hook in hooks_in(copied))


def test_traced_models_can_be_saved(tmp_path):
    model = mlp()
    with tap.trace(model, "0.forward.return"):
        model(X)
        assert not hooks_in(reloaded(model))
        assert not hooks_in(copy.deepcopy(model))


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


def test_model_that_is_trained_in_eval_mode(found, caplog):
    model = mlp().eval()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.track(model, optimizer=opt) as tracker:
        for _ in range(3):
            model(X).sum().backward()
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                model(X)  # a validation
            tracker.step()
        assert "eval() mode" in tracker.unseen["Sequential"]
    seen = found(tracker)
    for kind in (ACT, GRAD):
        assert [(r.step, r.call, r.tags) for r in seen.of(kind, "2")] == [
            (1, 0, {"mode": "eval"}),
            (2, 0, {"mode": "eval"}),
        ]
    assert sum("eval() mode" in record.message for record in caplog.records) == 1


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


def test_called_modules_are_not_reported():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with tap.track(model, include="linear") as tracker:
        model(torch.randn(2, 3, 8)).sum().backward()
        tracker.step()
    assert tracker.unseen == {}


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


# -- modules that come and go --------------------------------------------------------------


class Adapter(nn.Module):
    """Adds to what it wraps, as adapters do that are injected into a model."""

    def __init__(self, base):
        super().__init__()
        self.base, self.low = base, nn.Linear(8, 2)

    def forward(self, x):
        return self.base(x) + self.low(x)


def test_modules_added_later_are_observed_from_the_next_step(found, caplog):
    model = mlp()
    with tap.track(model) as tracker:
        for step in range(3):
            if step == 1:  # in use from now on
                model[2] = Adapter(model[2])
                model.insert(1, nn.Tanh())
            model(X).sum().backward()
            model.zero_grad()  # before the step, as a training loop may do
            tracker.step()
        assert tracker.unseen == {}
        late = {"1", "2", "3", "3.base", "3.low"}
        assert set(tracker.remarks) == late
        assert "3.low: it was added after tracking began" in caplog.text.replace(", ", ": ")
        records = found(tracker)
    assert {r.step for r in records.of(ACT, "3.low")} == {2}
    assert {r.step for r in records.of(GRAD, "3.low")} == {2}
    assert [r.shape for r in records.of(ACT, "3.base") if r.step == 2] == [(5, 2)]
    # under its new name only, and once per call
    assert [(r.step, r.call) for r in records.of(ACT, "2") if r.step == 2] == [(2, 0)]
    assert hooks_in(model) == []


def test_modules_that_have_left_are_not_observed(found):
    model = mlp()
    with tap.track(model) as tracker:
        for step in range(3):
            if step == 1:
                left, model[1] = model[1], nn.Identity()
            model(X).sum().backward()
            tracker.step()
            if step == 1:
                assert hooks_in(left) == []
        assert {r.step for r in found(tracker).of(ACT, "1")} == {0, 2}
    gone = weakref.ref(left)
    del left
    gc.collect()
    assert gone() is None
