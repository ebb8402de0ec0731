"""Where the first NaN of a step was made: in a module, or in code between two modules."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tap
from tensortap import alerts
from tensortap.core.record import Kind
from tensortap.rooms.health.torch import losses, passes
from tensortap.rooms.ops import torch_origins as origins
from tensortap.rooms.track import packed
from tensortap.rooms.track.packed import PendingSummary

pytestmark = pytest.mark.usefixtures("no_errors")


@pytest.fixture(params=[False, True], ids=["cpu", "device"])
def anywhere(request, monkeypatch):
    """Run on the CPU, and as if on a device: statistics are known after the step has ended."""
    if not request.param:
        return
    summary_of = packed.summary_of

    def later(value):
        stats, _ = summary_of(value)
        return None, PendingSummary(lambda: False, lambda: stats)

    monkeypatch.setattr(packed, "summary_of", later)
    monkeypatch.setattr(origins, "on_device", lambda tensor: True)


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * torch.nan


class Attn(nn.Module):
    """Code between modules: before, among and after its own children, as `fault` says."""

    def __init__(self, fault):
        super().__init__()
        self.q, self.o_proj, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity()
        self.fault = fault

    def forward(self, x, mask=None):
        x = self.q(x)
        if self.fault == "between":
            x = x * (x * 0) / (x * 0)
        if self.fault == "in place":
            x *= torch.nan
        if self.fault == "backward":
            x = BadBackward.apply(x)
        if self.fault == "identity":
            x = self.drop(x * torch.nan)
        x = self.o_proj(x)
        return x / 0 if self.fault == "after" else x


class Layer(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(4), Attn(fault)
        self.fault = fault

    def forward(self, x):
        h = self.norm(x)
        if self.fault == "outside":
            h = h * torch.inf
        return (x + self.attn(x=h)) * (torch.nan if self.fault == "last" else 1)


class Decoder(nn.Module):
    """Layers in a list, all of which get a mask with -Inf; the second one has the fault."""

    def __init__(self, fault):
        super().__init__()
        self.layers = nn.ModuleList(Masked(each) for each in ("", fault, ""))
        self.head = nn.Linear(4, 4)
        self.fault = fault

    def forward(self, x):
        mask = torch.full((4, 4), -torch.inf).triu(1)
        for n, layer in enumerate(self.layers):
            (x,) = layer(x, mask=mask)
            if self.fault == "after layer 1" and n == 1:
                x = BadBackward.apply(x)
        return self.head(x)


class Masked(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.attn, self.mlp, self.fault = Attn(fault), nn.Sequential(nn.Linear(4, 4)), fault

    def forward(self, x, mask):
        x = x + self.attn(x, mask=mask)
        h = self.mlp(x)
        return (x + (BadBackward.apply(h) if self.fault == "after mlp" else h),)


class Cross(nn.Module):
    """Cross-attention by the fused kernel."""

    def __init__(self, fault):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))
        self.fault = fault

    def forward(self, x, context):
        q, k, v = self.q(x), self.k(context), self.v(context)
        if self.fault == "keys":
            k = k * torch.inf
        if self.fault == "values":
            v = BadBackward.apply(v)
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v))


class Crossing(nn.Module):
    """Layers with cross-attention in checkpoints, or without; the second one has the fault."""

    def __init__(self, fault, checkpointed=None):
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Cross(each) for each in ("", fault))
        self.fault, self.checkpointed = fault, checkpointed

    def forward(self, x):
        context = self.encoder(x) * (torch.nan if self.fault == "context" else 1)
        for layer in self.layers:
            if self.checkpointed is None:
                x = x + layer(x, context)
            else:
                x = x + checkpoint(layer, x, context, use_reentrant=self.checkpointed)
        return x


class Bad(nn.Module):
    def forward(self, x):
        return BadBackward.apply(x)


class Part(nn.Sequential):
    """torch does not compile its own modules in place."""

    def forward(self, x):
        return super().forward(x)


class Forked(nn.Module):
    """The backward pass of `bad` fails, which gets the output of `q` through code, or directly."""

    def __init__(self, fault):
        super().__init__()
        self.q, self.k, self.o = (Part(nn.Linear(4, 4)) for _ in range(3))
        self.bad = Part(Bad(), nn.Tanh())
        self.fault = fault

    def forward(self, x):
        h = self.q(x)
        return self.o(self.bad(h * 2) if self.fault == "scaled" else self.k(h) + self.bad(h))


def alerts_of(fault, batch=1.0, make=Layer, compiled=lambda model: (), **options):
    torch.manual_seed(0)
    model = make(fault)
    for part in compiled(model):
        part.compile(backend="aot_eager", fullgraph=True)
    rules = [alerts.nan(), alerts.inf()]
    with tap.track(model, alerts=rules, kind=("activation", "gradient"), **options) as tracker:
        model(torch.rand(3, 4) * batch).square().mean().backward()
        tracker.step()
    return tracker.alerts


@pytest.mark.parametrize(
    ("fault", "name", "origin", "where"),
    [
        ("between", "attn.o_proj", "attn", "made in Attn.forward (test_torch_origins.py"),
        ("between", "attn.o_proj", "attn", "between attn.q and attn.o_proj"),
        ("in place", "attn.o_proj", "attn", "between attn.q and attn.o_proj"),
        ("identity", "attn.drop", "attn", "between attn.q and attn.drop"),
        ("after", "attn", "attn", "made in Attn.forward, after attn.o_proj"),
        ("outside", "attn.q", "Layer", "made in Layer.forward (test_torch_origins.py"),
        ("outside", "attn.q", "Layer", "between norm and attn"),
        ("last", "Layer", "Layer", "made in Layer.forward, after attn"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("anywhere")
def test_code_between_modules_is_named_as_the_origin(fault, name, origin, where):
    first = alerts_of(fault)[0]
    assert (first.name, first.origin) == (name, origin)
    assert where in first.message


@pytest.mark.usefixtures("anywhere")
def test_module_with_finite_inputs_is_the_origin_and_a_bad_batch_is_said():
    class Makes(nn.Module):
        def forward(self, x):
            return x.mul_(torch.nan)  # in place: its input is gone

    model = nn.Sequential(nn.Linear(4, 4), Makes(), nn.Linear(4, 4))
    with tap.track(model, alerts=[alerts.nan()], kind=("activation", "gradient")) as tracker:
        model(torch.ones(2, 4))
        tracker.step()
    (alert,) = tracker.alerts
    assert (alert.name, alert.origin) == ("1", "1")
    assert "its input was finite" in alert.message
    first = alerts_of("", torch.nan)[0]
    assert (first.name, first.origin) == ("norm", "Layer")
    assert "the input of Layer was NaN: check the batch" in first.message


def test_weights_that_are_not_finite_before_the_step_are_named_first():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with tap.track(model, alerts=[alerts.nan()], kind=("activation", "weight")) as tracker:
        model(torch.ones(2, 4))
        tracker.step()
        with torch.no_grad():
            model[1].bias[2] = torch.nan
        model(torch.ones(2, 4))
        tracker.step()
    (alert,) = tracker.alerts
    assert (alert.name, alert.origin) == ("1", "1")
    assert "; 1.bias was not finite before this step" in alert.message


@pytest.mark.usefixtures("anywhere")
def test_code_between_modules_is_named_as_the_origin_of_a_gradient():
    first = alerts_of("backward")[0]
    assert (first.name, first.kind) == ("attn.q", Kind.GRADIENT)
    assert first.origin == "attn"
    assert "the code in attn, between attn.q and attn.o_proj" in first.message


@pytest.mark.parametrize(
    ("fault", "name", "origin", "where"),
    [
        ("between", "layers.1.attn.o_proj", "layers.1.attn", "made in Attn.forward"),
        ("after mlp", "layers.1.mlp.0", "layers.1", "the code in layers.1, after layers.1.mlp.0"),
        ("after layer 1", "layers.1[0]", "Decoder", "the code between layers.1 and layers.2."),
    ],
)
@pytest.mark.usefixtures("anywhere")
def test_origin_in_a_list_of_layers_with_a_mask(fault, name, origin, where):
    first = alerts_of(fault, make=Decoder)[0]
    assert (first.name, first.origin) == (name, origin)
    assert where in first.message


@pytest.mark.parametrize(
    ("fault", "name", "origin", "where"),
    [
        ("keys", "layers.1.o", "layers.1", "made in Cross.forward (test_torch_origins.py"),
        ("context", "layers.0.k", "Crossing", "made in Crossing.forward (test_torch_origins.py"),
        ("context", "layers.0.k", "Crossing", "before layers.0"),
        ("values", "layers.1.v", "layers.1", "between layers.1.v and layers.1.o made it"),
    ],
)
@pytest.mark.parametrize("checkpointed", [None, False, True])
@pytest.mark.usefixtures("anywhere")
def test_origin_in_cross_attention_and_checkpoints(fault, name, origin, where, checkpointed):
    batch = torch.ones(3, 4, requires_grad=True)  # which reentrant checkpoints need
    make = functools.partial(Crossing, checkpointed=checkpointed)
    first = alerts_of(fault, batch, make=make)[0]
    assert (first.name, first.origin) == (name, origin)
    assert where in first.message


@pytest.mark.usefixtures("anywhere")
def test_backward_of_a_module_is_told_from_the_code_before_it():
    for fault, modules in (("scaled", "bad.0"), ("direct", "k.0 or bad.0")):
        first = alerts_of(fault, make=Forked)[0]
        assert (first.name, first.kind) == ("q.0", Kind.GRADIENT)
        assert first.origin in modules
        assert first.message.endswith(f": the backward pass of {modules} made it")


def test_looking_for_the_origin_does_not_wait_for_a_device(monkeypatch):
    """Reading a value would block training until the device has computed it."""
    monkeypatch.setattr(origins, "on_device", lambda tensor: True)
    for module in (passes, losses):
        monkeypatch.setattr(module, "is_plain", lambda tensor: False)
    pending = PendingSummary(lambda: False, lambda: None)
    monkeypatch.setattr(packed, "summary_of", lambda value: (None, pending))
    model, x = Layer("between"), torch.rand(3, 4)
    with tap.track(model, alerts=True) as tracker:
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "cpu", "numpy", "nonzero"):

                def waits(*args, name=name, **kwargs):
                    raise AssertionError(f"{name} waits for the device")

                patch.setattr(torch.Tensor, name, waits)
            model(x).square().mean().backward()
        tracker.step()
