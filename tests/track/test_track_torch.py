"""Tracking a torch model: names, steps and values of all kinds of records."""

import collections

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.core.record import Kind
from tensortap.values import rebuild

pytestmark = pytest.mark.usefixtures("no_errors")

ACT, GRAD, WEIGHT = Kind.ACTIVATION, Kind.GRADIENT, Kind.WEIGHT
WGRAD, STATE, METRIC = Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE, Kind.METRIC


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        collections.OrderedDict(fc1=nn.Linear(4, 8), act=nn.ReLU(), fc2=nn.Linear(8, 2))
    )


def train(model, opt, tracker, steps=3, size=5):
    for n in range(steps):
        torch.manual_seed(n)
        opt.zero_grad()
        loss = model(torch.randn(size, 4)).square().mean()
        loss.backward()
        opt.step()
        tracker.step(loss=loss.item())


# -- what is seen, where -------------------------------------------------------------------


def test_outputs_and_their_gradients(found):
    model = mlp()
    x = torch.randn(5, 4)
    h = model.fc1(x).detach().requires_grad_()
    a = h.relu()
    a.retain_grad()
    y = model.fc2(a)
    y.retain_grad()
    y.square().mean().backward()
    model.zero_grad()
    with tap.track(model) as tracker:
        model(x).square().mean().backward()
        tracker.step()
    seen = found(tracker)
    values = {"fc1": h, "act": a, "fc2": y, "Sequential": y}
    assert seen.names(ACT) == ["fc1", "act", "fc2", "Sequential"]
    assert sorted(seen.names(GRAD)) == sorted(values)
    for name, value in values.items():
        record = seen.one(ACT, name)
        assert record.stats == tap.viz.summarize(value)
        assert (record.shape, record.dtype, record.call) == (tuple(value.shape), "float32", 0)
        gradient = seen.one(GRAD, name)
        assert gradient.stats == tap.viz.summarize(value.grad)
        assert gradient.type == record.type
    assert seen.one(ACT, "fc1").type == "torch.nn.Linear"
    # the backward pass starts at the last module
    assert seen.names(GRAD)[-1] == "fc1"


def test_weights_gradients_and_state_of_each_step(found):
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected = []
    with tap.track(model, optimizer=opt) as tracker:
        for n in range(3):
            opt.zero_grad()
            loss = model(torch.full((5, 4), n + 1.0)).square().mean()
            loss.backward()
            gradients = {k: tap.viz.summarize(p.grad) for k, p in model.named_parameters()}
            opt.step()
            weights = {k: tap.viz.summarize(p) for k, p in model.named_parameters()}
            state = {
                f"{k}.{key}": tap.viz.summarize(value)
                for k, p in model.named_parameters()
                for key, value in opt.state[p].items()
            }
            expected.append((gradients, weights, state))
            tracker.step(loss=loss)
    seen = found(tracker)
    for n, (gradients, weights, state) in enumerate(expected):
        for kind, values in ((WGRAD, gradients), (WEIGHT, weights), (STATE, state)):
            assert {r.name: r.stats for r in seen.of(kind, step=n)} == values
        assert {r.step for r in seen.of(ACT, "fc1")} == {0, 1, 2}
    assert len(expected[0][2]) == 4 * 3  # exp_avg, exp_avg_sq, step
    assert [r.step for r in seen.of(METRIC, "loss")] == [0, 1, 2]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("when", ["before backward", "before tracker.step"])
def test_weight_gradients_belong_to_this_step(given, to_none, when, found):
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with tap.track(model, optimizer=opt if given else None) as tracker:
        for n in range(4):
            if when == "before backward":
                opt.zero_grad(set_to_none=to_none)
            model(torch.full((5, 4), n + 1.0)).square().mean().backward()
            expected.append({k: tap.viz.summarize(p.grad) for k, p in model.named_parameters()})
            opt.step()
            if when == "before tracker.step":
                opt.zero_grad(set_to_none=to_none)
            tracker.step()
    seen = found(tracker)
    for n, gradients in enumerate(expected):
        assert {r.name: r.stats for r in seen.of(WGRAD, step=n)} == gradients
        assert len(seen.of(WGRAD, step=n)) == 4


@pytest.mark.parametrize("given", [True, False])
def test_gradient_accumulation(given, found):
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with tap.track(model, optimizer=opt if given else None) as tracker:
        for n in range(2):
            for m in range(3):
                model(torch.full((5, 4), n + m + 1.0)).square().mean().backward()
            expected.append({k: tap.viz.summarize(p.grad) for k, p in model.named_parameters()})
            opt.step()
            opt.zero_grad()
            tracker.step()
    seen = found(tracker)
    for n in range(2):
        assert {r.name: r.stats for r in seen.of(WGRAD, step=n)} == expected[n]
        for kind in (ACT, GRAD):
            assert [r.call for r in seen.of(kind, "fc1", step=n)] == [0, 1, 2]


def test_gradient_has_the_call_of_its_forward_pass(found):
    model = mlp()
    with tap.track(model) as tracker:
        losses = [model(torch.full((5, 4), n + 1.0)).sum() * 10.0**n for n in range(3)]
        for loss in reversed(losses):
            loss.backward()
        tracker.step()
    gradients = {r.call: r.stats.max_abs for r in found(tracker).of(GRAD, "fc2")}
    assert gradients == {0: 1.0, 1: 10.0, 2: 100.0}
    assert [r.call for r in found(tracker).of(GRAD, "fc2")] == [2, 1, 0]


def test_grad_scaler(found):
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    with tap.track(model, optimizer=opt) as tracker:
        for n in range(3):
            loss = model(torch.ones(5, 4)).sum() * (torch.inf if n == 1 else 1)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            tracker.step()
    seen = found(tracker)
    assert [len(seen.of(WGRAD, "fc2.bias", step=n)) for n in range(3)] == [1, 1, 1]
    assert seen.one(WGRAD, "fc2.bias", 0).stats.max == 5.0  # unscaled, as the optimizer uses it
    assert seen.one(WGRAD, "fc2.bias", 1).stats.posinfs


def test_gradients_from_before_tracking_are_ignored(found):
    model = mlp()
    model(torch.randn(5, 4)).sum().backward()
    with tap.track(model) as tracker:
        tracker.step()
        model(torch.randn(5, 4)).sum().backward()
        tracker.step()
        tracker.step()
    assert [(r.step, r.name) for r in found(tracker).of(WGRAD)] == [
        (1, name) for name, _ in model.named_parameters()
    ]


def test_two_optimizer_steps_within_a_step(found):
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.track(model, optimizer=opt) as tracker:
        for scale in (1.0, 10.0):
            opt.zero_grad()
            (model(torch.ones(5, 4)).sum() * scale).backward()
            opt.step()
        tracker.step()
    records = found(tracker).of(WGRAD, "fc2.bias")
    assert [(r.call, r.stats.max) for r in records] == [(0, 5.0), (1, 50.0)]


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state(name, found):
    model = mlp()
    model.fc1.weight.requires_grad_(False)
    opt = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])

    def closure():
        opt.zero_grad()
        loss = model(torch.ones(5, 4)).square().mean()
        loss.backward()
        return loss

    with tap.track(model, optimizer=opt) as tracker:
        opt.step(closure)
        expected = {}
        for key, p in model.named_parameters():
            for entry, value in opt.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    expected[f"{key}.{entry}"] = tap.viz.summarize(value)
        tracker.step()
    seen = found(tracker)
    states = {r.name: r.stats for r in seen.of(STATE)}
    assert expected
    assert states.items() >= expected.items()
    for record in seen.of(STATE):
        assert record.tags["parameter"] in dict(model.named_parameters())
        assert record.name.startswith(f"{record.tags['parameter']}.{record.tags['state']}")
    assert not [r for r in seen.of(STATE) if r.name.startswith("fc1.weight")]
    if name == "adafactor":
        assert {"fc2.weight.row_var", "fc2.weight.col_var"} <= set(states)


def test_frozen_parameters_groups_and_several_optimizers(found):
    """State is matched by the parameter itself, not by its position."""
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(5)])
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    weights = [layer.weight for layer in model]
    groups = [{"params": [weights[3], weights[2]], "lr": 0.1}, {"params": weights[0:2], "lr": 0.2}]
    one = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    two = torch.optim.Adam([weights[4]])
    with tap.track(model, optimizer=[one, two]) as tracker:
        model(torch.randn(3, 4)).sum().backward()
        one.step()
        two.step()
        tracker.step()
    seen = found(tracker)
    states = {r.name: r.stats for r in seen.of(STATE)}
    assert set(states) == {
        "1.weight.momentum_buffer", "3.weight.momentum_buffer",
        "4.weight.exp_avg", "4.weight.exp_avg_sq", "4.weight.step",
    }  # fmt: skip
    for n in (1, 3):
        buffer = one.state[weights[n]]["momentum_buffer"]
        assert states[f"{n}.weight.momentum_buffer"] == tap.viz.summarize(buffer)
    assert states["4.weight.exp_avg"] == tap.viz.summarize(two.state[weights[4]]["exp_avg"])
    assert sorted(seen.names(WGRAD)) == ["1.weight", "3.weight", "4.weight"]
    assert sorted(seen.names(WEIGHT)) == [f"{n}.weight" for n in range(5)]


def test_parameter_outside_the_model_is_named_by_its_position(found):
    model, scale = mlp(), nn.Parameter(torch.ones(()))
    opt = torch.optim.SGD([*model.parameters(), scale], lr=0.1, momentum=0.9)
    with tap.track(model, optimizer=opt) as tracker:
        (model(torch.randn(3, 4)) * scale).sum().backward()
        opt.step()
        tracker.step()
    seen = found(tracker)
    assert "optimizer.4" in seen.names(WGRAD)
    assert "optimizer.4.momentum_buffer" in seen.names(STATE)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def test_tied_weights_are_recorded_once_with_a_tag(found):
    model = Tied()
    opt = torch.optim.Adam(model.parameters())
    with tap.track(model, optimizer=opt) as tracker:
        model(torch.arange(6)).sum().backward()
        opt.step()
        tracker.step()
    seen = found(tracker)
    assert seen.names(WEIGHT) == seen.names(WGRAD) == ["embed.weight"]
    assert seen.one(WEIGHT, "embed.weight").tags == {"shared": "head.weight"}
    assert {r.tags["parameter"] for r in seen.of(STATE)} == {"embed.weight"}
    assert seen.names(ACT) == ["embed", "head", "Tied"]


# -- in-place, leaves, several backward passes ---------------------------------------------


def test_in_place_modules(found):
    """An in-place operation removes a view, like a 3-D Linear's output, from the graph."""

    def make(inplace):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(inplace), nn.Dropout(0.0, inplace), nn.Linear(8, 2)
        )

    x = torch.randn(2, 3, 4)
    gradients = []
    for inplace in (False, True):
        model = make(inplace)
        with tap.track(model, tensors=True) as tracker:
            model(x).square().sum().backward()
            tracker.step()
        seen = found(tracker)
        gradients.append({r.name: r.stats for r in seen.of(GRAD)})
        assert len(seen.of(GRAD)) == 5
        before = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
        # as the module returned it, although it was overwritten later
        assert torch.equal(rebuild(seen.one(ACT, "0").value), before)
        assert seen.one(ACT, "0").stats == tap.viz.summarize(before)
    assert gradients[0] == gradients[1]


class GivesItsParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(3))

    def forward(self):
        return self.table


class UsesIt(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = GivesItsParameter()

    def forward(self, x):
        return x * self.position()


def test_module_that_returns_its_parameter_has_one_gradient_per_step(found):
    model = UsesIt()
    with tap.track(model) as tracker:
        for n in range(4):
            model(torch.full((3,), n + 1.0)).sum().backward()
            model.zero_grad()
            tracker.step()
    records = found(tracker).of(GRAD, "position")
    assert [(r.step, r.stats.max) for r in records] == [(n, n + 1.0) for n in range(4)]
    assert not model.position.table._backward_hooks


def test_second_backward_pass_is_tagged(found):
    model = mlp()
    with tap.track(model) as tracker:
        loss = model(torch.ones(5, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        tracker.step()
    assert [r.tags for r in found(tracker).of(GRAD, "fc1")] == [{}, {"backward": "2"}]


# -- what is chosen ------------------------------------------------------------------------


def kinds(tracker):
    return {r.kind for r in tracker.records}


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (None, {ACT, GRAD, WEIGHT, WGRAD, STATE}),
        ("activation", {ACT}),
        (GRAD, {GRAD}),
        (["weights", WGRAD], {WEIGHT, WGRAD}),
        (("optimizer_state", "input"), {STATE, ACT}),
        ("all", {ACT, GRAD, WEIGHT, WGRAD, STATE}),
    ],
)
def test_kinds_are_selected(kind, wanted):
    model = mlp()
    opt = torch.optim.Adam(model.parameters())
    with tap.track(model, optimizer=opt, kind=kind) as tracker:
        train(model, opt, tracker, 1)
    assert kinds(tracker) == {*wanted, METRIC}
    has_inputs = any(".input" in record.name for record in tracker.records)
    assert has_inputs == (kind == "all" or "input" in (kind or ()))


def test_unknown_kinds_are_named():
    with pytest.raises(ValueError, match="kind: unknown kind 'inputz'; the kinds are activation"):
        tap.track(mlp(), kind=["weight", "inputz"])


def test_include_and_exclude(found):
    model = mlp()
    opt = torch.optim.Adam(model.parameters())
    with tap.track(model, optimizer=opt, include=r"^fc", exclude=r"bias") as tracker:
        train(model, opt, tracker, 1)
    seen = found(tracker)
    assert seen.names(ACT) == ["fc1", "fc2"]
    assert seen.names(WEIGHT) == seen.names(WGRAD) == ["fc1.weight", "fc2.weight"]
    assert len(seen.of(STATE)) == 6
    wanted = {"activations": "act", "gradients": "fc2", "weights": "bias", "Weight_Gradient": "1"}
    with tap.track(
        model, optimizer=opt, include=wanted, exclude={"optimizer_state": "exp|step"}
    ) as tracker:
        train(model, opt, tracker, 1)
    seen = found(tracker)
    assert seen.names(ACT) == ["act"]
    assert seen.names(GRAD) == ["fc2"]
    assert seen.names(WEIGHT) == ["fc1.bias", "fc2.bias"]
    assert seen.names(WGRAD) == ["fc1.weight", "fc1.bias"]
    assert seen.of(STATE) == []


def test_every(found):
    model = mlp()
    opt = torch.optim.Adam(model.parameters())
    with tap.track(model, optimizer=opt, every=3, init_step=10) as tracker:
        train(model, opt, tracker, 7)
    seen = found(tracker)
    for kind in (ACT, GRAD, WEIGHT, WGRAD, STATE):
        assert sorted({r.step for r in seen.of(kind)}) == [10, 13, 16]
    # metrics are recorded at every step
    assert [r.step for r in seen.of(METRIC)] == list(range(10, 17))


def test_an_idle_tracker_has_no_hooks_until_it_is_switched_on():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def hooks():
        own = (opt._optimizer_step_pre_hooks, *(m._forward_hooks for m in model.modules()))
        return sum(map(len, own))

    found = []
    with tap.track(model, opt, every=0, alerts=True, analyses=True) as tracker:
        for step in range(8):
            found.append(hooks() > 0)
            if step in (2, 5):
                tracker.switch(every=2 if step == 2 else 0)
            model(torch.ones(1, 2)).sum().backward()
            opt.step()
            tracker.step(loss=1.0)
    assert found == [False] * 3 + [True] * 3 + [False] * 2
    steps = {
        kind: {r.step for r in tracker.records if r.kind is kind} for kind in (ACT, Kind.METRIC)
    }
    assert steps == {ACT: {3, 5}, Kind.METRIC: set(range(8))}
    assert tracker.unseen == {}
    with pytest.raises(ValueError, match="every must be at least 0"):
        tracker.switch(-1)


def test_whole_tensors_by_pattern(found):
    model = mlp()
    opt = torch.optim.Adam(model.parameters())
    x = torch.randn(5, 4)
    with tap.track(model, optimizer=opt, tensors=r"^fc2") as tracker:
        y = model(x)
        kept = y.detach().clone()
        y.square().mean().backward()
        gradient = model.fc2.weight.grad.clone()
        opt.step()
        weight = model.fc2.weight.detach().clone()
        tracker.step()
        with torch.no_grad():
            y.zero_()
            model.fc2.weight.zero_()
    seen = found(tracker)
    for kind, name, value in (
        (ACT, "fc2", kept), (WGRAD, "fc2.weight", gradient), (WEIGHT, "fc2.weight", weight),
    ):  # fmt: skip
        record = seen.one(kind, name)
        assert torch.equal(rebuild(record.value), value)
        assert record.stats == tap.viz.summarize(value)
    assert all((r.value is not None) == r.name.startswith("fc2") for r in seen.all if r.stats)


def test_stash():
    model = mlp()
    with tap.track(
        model, stash=lambda t: {"l1": t.abs().sum().item(), "mean": 5}, tensors="act"
    ) as tracker:
        y = model(torch.randn(5, 4))
        y.sum().backward()
        tracker.step(loss=1.0)
    frame = tracker.logframe()
    rows = frame[
        frame["metadata"]["name"].eq("fc2") & frame["metadata"]["tensor_type"].eq("Activation")
    ]
    assert rows["scalar_stats"]["l1"].item() == pytest.approx(y.abs().sum().item())
    assert rows["scalar_stats"]["stash.mean"].item() == 5
    assert rows["scalar_stats"]["mean"].item() == pytest.approx(y.mean().item())
    assert frame["scalar_stats"]["l1"].notna().all()


def test_eval_is_skipped_by_default(found):
    model = mlp()
    with tap.track(model) as tracker:
        model.eval()
        model(torch.randn(5, 4))
        model.train()
        model(torch.randn(5, 4))
        tracker.step()
    assert [(r.call, r.tags) for r in found(tracker).of(ACT, "fc1")] == [(0, {})]
    with tap.track(model, only_training=False) as tracker:
        model.eval()
        model(torch.randn(5, 4))
        model.train()
        model(torch.randn(5, 4))
        tracker.step()
    records = found(tracker).of(ACT, "fc1")
    assert [(r.call, r.tags) for r in records] == [(0, {"mode": "eval"}), (1, {})]


# -- misuse --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"inclde": "x"}, TypeError, "inclde"),
        ({"every": -1}, ValueError, "every"),
        ({"tensors": "("}, ValueError, "tensors"),
        ({"on_alert": "stop"}, ValueError, "alerts"),
    ],
)
def test_rejects_invalid_options(options, error, says):
    with pytest.raises(error, match=says):
        tap.track(mlp(), **options)


def test_rejects_other_objects():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        tap.track([1, 2])
