"""Optimizers inside wrappers, and optimizers that raise."""

import copy
import pickle

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.core.record import Kind
from tensortap.rooms.track.torch.optimizers import find_optimizers

WGRAD, STATE = Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE


class Wrapper:
    """Holds an optimizer under any name, as trainers do."""

    def __init__(self, inner, name="optimizer"):
        vars(self)[name] = inner
        self._name = name

    def step(self, closure=None):
        return vars(self)[self._name].step(closure)

    def zero_grad(self, set_to_none=True):
        vars(self)[self._name].zero_grad(set_to_none)

    param_groups = property(lambda self: vars(self)[self._name].param_groups)
    state = property(lambda self: vars(self)[self._name].state)


class Imitates(torch.optim.Optimizer):
    """An Optimizer that never was initialized, with a state of its own."""

    def __init__(self, inner):
        self.base, self.state = inner, {}

    @property
    def param_groups(self):
        return self.base.param_groups

    def step(self, closure=None):
        return self.base.step(closure)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


class Several(torch.optim.Optimizer):
    """A container of optimizers, one per parameter."""

    def __init__(self, parameters):
        self.optimizers = [torch.optim.AdamW([parameter]) for parameter in parameters]

    @property
    def param_groups(self):
        return [group for each in self.optimizers for group in each.param_groups]

    def step(self, closure=None):
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none=True):
        for each in self.optimizers:
            each.zero_grad(set_to_none)


WRAPPERS = {
    "plain": lambda p: torch.optim.AdamW(p),
    "other name": lambda p: Wrapper(torch.optim.AdamW(p), "_base_optimizer"),
    "nested": lambda p: Wrapper(Imitates(Wrapper(torch.optim.AdamW(p)))),
    "several": lambda p: Several(p),
}


@pytest.mark.parametrize("way", WRAPPERS)
@pytest.mark.parametrize("zeroed", ["before", "after"])
def test_optimizers_inside_wrappers(way, zeroed, found, no_errors):
    model = nn.Linear(4, 2)
    opt = WRAPPERS[way](list(model.parameters()))
    with tap.track(model, optimizer=opt) as tracker:
        for _ in range(3):
            if zeroed == "before":
                opt.zero_grad()
            model(torch.ones(5, 4)).sum().backward()
            opt.step()
            if zeroed == "after":
                opt.zero_grad()
            tracker.step()
    seen = found(tracker)
    for name in ("weight", "bias"):
        gradients = [(r.step, r.call, r.stats.max) for r in seen.of(WGRAD, name)]
        assert gradients == [(step, 0, 5.0) for step in range(3)]
        assert [r.step for r in seen.of(STATE, f"{name}.exp_avg")] == [0, 1, 2]
    assert tracker.unseen == {}
    for each in find_optimizers(opt):
        assert "zero_grad" not in vars(each.optimizer)
        assert not getattr(each.optimizer, "_optimizer_step_pre_hooks", None)


class Flat(Wrapper):
    """Moves all gradients into one tensor of its own, as DeepSpeed's ZeRO does."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
        super().__init__(torch.optim.AdamW([self.flat]))

    def step(self, closure=None):
        self.flat.grad = torch.cat([p.grad.flatten() for p in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None
        super().step()


def test_says_that_an_optimizer_trains_copies_of_the_weights(found, no_errors):
    model = nn.Linear(4, 2)
    opt = Flat(list(model.parameters()))
    with tap.track(model, optimizer=opt) as tracker:
        for _ in range(2):
            model(torch.ones(5, 4)).sum().backward()
            opt.step()
            tracker.step()
    assert [r.step for r in found(tracker).of(WGRAD, "optimizer.0")] == [0, 1]
    assert list(tracker.unseen) == ["weight gradients"]
    assert "optimizer.0" in tracker.unseen["weight gradients"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_copies_of_optimizers_have_no_hooks(copied, no_errors):
    model = nn.Linear(4, 2)
    opt = torch.optim.AdamW(model.parameters())
    with tap.track(model, optimizer=opt):
        other = copied(opt)
        assert "zero_grad" not in vars(other)
        assert not other._optimizer_step_pre_hooks
        assert not other._optimizer_step_post_hooks


class Broken:
    """Looks like an optimizer and takes nothing."""

    __slots__ = ("parameters",)

    def __init__(self, parameters):
        self.parameters = list(parameters)

    @property
    def param_groups(self):
        return 5

    @property
    def state(self):
        raise KeyError("state")

    def step(self):
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= 0.1 * parameter.grad


def test_no_optimizer_makes_a_hook_raise():
    model = nn.Linear(4, 2)
    opt = Broken(model.parameters())
    with tap.track(model, optimizer=opt) as tracker:
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(5, 4)).sum().backward()
            opt.step()
            tracker.step()
    assert {r.step for r in tracker.records if r.kind is WGRAD} == {0, 1, 2}
    assert {r.step for r in tracker.records if r.kind is Kind.WEIGHT} == {-1, 0, 1, 2}
    assert "optimizer" in tracker.unseen


def test_rejects_what_is_no_optimizer():
    for wrong in (5, "adam", nn.Linear(1, 1), ["adam"]):
        with pytest.raises(TypeError, match="optimizer must be a torch optimizer"):
            tap.track(nn.Linear(1, 1), optimizer=wrong)


def in_func(model):
    call = torch.func.functional_call
    torch.func.grad(lambda p: call(model, p, torch.ones(2, 3)).sum())(
        dict(model.named_parameters())
    )


def nested(layout):
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    return lambda model: model(torch.nested.nested_tensor(parts, layout=layout))


@pytest.mark.parametrize(
    ("model", "run", "name", "reason"),
    [
        (nn.Linear(3, 3), in_func, "Linear", "torch.func"),
        (nn.Linear(3, 3), lambda model: torch.vmap(model)(torch.ones(4, 3)), "Linear", "vmap"),
        (nn.Linear(3, 3), nested(torch.jagged), "Linear", "nested"),
        (nn.Linear(3, 3), nested(torch.strided), "Linear", "nested tensor has no single shape"),
        (nn.LazyLinear(3), lambda model: model(torch.ones(2, 3)), "weight", "lazy"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_is_not_captured_is_unseen(model, run, name, reason, monkeypatch):
    monkeypatch.delenv("TENSORTAP_STRICT", raising=False)
    with tap.track(model, alerts=True) as tracker:
        run(model)
        tracker.step()
    assert reason in tracker.unseen[name]
    assert set(tracker.unseen) <= {name, "bias"}  # rules over steps go on


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torchao
def test_quantized_weights_and_states_are_dequantized():
    from torchao.optim import AdamW8bit
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def train(track):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
        quantize_(model[:1], Int8WeightOnlyConfig())
        opt = AdamW8bit(model[2].parameters(), lr=1e-2)
        with tap.track(model, optimizer=opt, alerts=True, every=1 if track else 100) as tracker:
            tracker.step()
            for _ in range(2):
                model(torch.ones(2, 128)).square().sum().backward()
                opt.step()
                opt.zero_grad()
                tracker.step()
        return model, opt, tracker

    model, opt, tracker = train(track=True)
    assert tracker.unseen == {}
    held = {
        "0.weight": model[0].weight, "2.weight.exp_avg": opt.state[model[2].weight]["exp_avg"]
    }  # fmt: skip
    for name, tensor in held.items():
        record = [r for r in tracker.records if r.name == name and r.stats is not None][-1]
        assert record.tags["dequantized"] == type(tensor).__name__
        values = tensor.dequantize()
        assert (record.stats.min, record.stats.max) == (values.min().item(), values.max().item())
    assert torch.equal(model[2].weight, train(track=False)[0][2].weight)


class Opaque(torch.Tensor):
    """A tensor made of others, of which nobody knows how to make a plain one."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes):
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(str(func))


def test_weights_and_states_of_unknown_classes_are_unseen(monkeypatch):
    monkeypatch.delenv("TENSORTAP_STRICT", raising=False)
    held = Opaque(torch.arange(6, dtype=torch.int8))
    model = nn.Linear(4, 2)
    model.frozen = nn.Parameter(held, requires_grad=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.track(model, optimizer=opt) as tracker:
        model(torch.ones(5, 4)).sum().backward()
        opt.step()
        opt.state[model.weight]["exp_avg"] = held
        tracker.step()
    for name in ("frozen", "weight.exp_avg"):
        assert "only wraps other tensors" in tracker.unseen[name]
        assert not [r for r in tracker.records if r.name == name and r.stats is not None]


def test_rules_go_on_with_lazy_weights_of_an_optimizer():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    with tap.track(model, optimizer, alerts=True) as tracker:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            tracker.step()
    assert set(tracker.unseen) == {"0.weight", "0.bias"}
    assert {alert.rule for alert in tracker.alerts} == {"unseen"}
