"""Requests that a program carries out between two steps, without a session in between."""

from __future__ import annotations

import flax.linen
import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.capture.pipeline import pipeline
from tensortap.core.errors import StopTraining
from tensortap.core.probes import ProbeRequest, probes
from tensortap.core.record import Kind


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


class Training:
    """A loop whose steps the test makes one by one."""

    def __init__(self, net=None, called=None, **options):
        self.net = model() if net is None else net
        self.called = called or self.net
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.tracker = tap.track(self.net, self.optimizer, **options) if options else None
        self.x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))

    def __enter__(self):
        if self.tracker is not None:
            self.tracker.__enter__()
        return self

    def __exit__(self, *error):
        if self.tracker is not None:
            self.tracker.__exit__(*error)

    def steps(self, count):
        for _ in range(count):
            self.optimizer.zero_grad()
            self.called(self.x).square().mean().backward()
            self.optimizer.step()
            if self.tracker is not None:
                self.tracker.step()

    def seen(self, kind=None):
        """Names by step."""
        found = {}
        for record in self.tracker.records:
            if record.step >= 0 and kind in (None, record.kind):
                found.setdefault(record.step, []).append(record.name)
        return found

    @property
    def bits(self):
        return [p.detach().clone() for p in self.net.parameters()]


def ask(pattern="", at=None, **options):
    at = (pipeline.clock.step or 0) + 1 if at is None else at
    answer = probes.receive(ProbeRequest(pattern=pattern, at=at, **options), "", at - 1)
    assert not answer.refusal, answer.refusal


def hooks(net):
    return sum(len(module._forward_hooks) for module in net.modules())


def test_idle_has_no_hooks_and_no_records():
    with Training(every=0) as training:
        training.steps(3)
        assert hooks(training.net) == 0
        assert training.seen() == {}


def test_a_pattern_is_looked_at_from_its_step_on_and_no_longer_than_asked():
    with Training(every=0) as training:
        training.steps(2)
        ask("^2$", at=4, every=2, steps=4)
        training.steps(8)
        assert training.seen(Kind.ACTIVATION) == {4: ["2"], 6: ["2"]}
        assert hooks(training.net) == 0  # again, once it has ended


def test_hooks_are_only_where_a_step_looks():
    with Training(every=0) as training:
        ask("^2$", every=3)
        counts = []
        for _ in range(6):
            training.steps(1)
            counts.append(hooks(training.net))
    assert counts == [1, 0, 0, 1, 0, 0]


def test_off_and_reset():
    with Training(every=1) as training:
        training.steps(1)
        ask("^0", every=0)
        training.steps(2)
        ask(action="reset")
        training.steps(2)
        outputs = training.seen(Kind.ACTIVATION)
    assert outputs[1] == outputs[4] == ["0", "1", "2", "Sequential"]
    assert outputs[2] == outputs[3] == ["1", "2", "Sequential"]


def test_kinds():
    with Training(every=0) as training:
        ask("", kind=("gradient",))
        training.steps(2)
        assert {r.kind for r in training.tracker.records} == {Kind.GRADIENT}


def test_whole_tensors_of_the_next_steps():
    with Training(every=1) as training:
        training.steps(1)
        ask("^2", tensors=True, steps=1)
        training.steps(3)
        records = training.tracker.records
    kept = {(r.step, r.name, r.kind.value) for r in records if r.value is not None}
    states = {(2, f"2.{p}.{s}", "Optimiser_State") for p in ("weight", "bias")
              for s in ("exp_avg", "exp_avg_sq", "step")}  # fmt: skip
    assert kept - states == {
        (2, "2", "Activation"), (2, "2", "Gradient"), (2, "2.weight", "Weight"),
        (2, "2.bias", "Weight"), (2, "2.weight", "Weight_Gradient"),
        (2, "2.bias", "Weight_Gradient"),
    }  # fmt: skip
    one = next(
        r for r in records if r.name == "2" and r.value is not None and r.kind is Kind.ACTIVATION
    )
    assert one.stats.count == 5


@pytest.mark.parametrize("every", [0, 1])
def test_training_has_the_same_bits_on_both_sides_of_a_switch(every):
    plain = Training()
    plain.steps(9)
    with Training(every=every) as training:
        training.steps(2)
        ask("^0", tensors=True, steps=2)
        training.steps(3)
        ask("", every=0)
        training.steps(2)
        ask(action="reset")
        training.steps(2)
        assert all(torch.equal(a, b) for a, b in zip(plain.bits, training.bits, strict=True))


def test_a_change_is_recorded_with_who_asked(open_run):
    with Training(every=0) as training:
        ask("^2", every=7, by="ada@host")
        training.steps(2)
    tap.finish()
    (change,) = tap.open(open_run).reader.records("tensortap.probe")
    assert change.step == 1
    assert change.tags["by"] == "ada@host"
    assert change.tags["every"] == "7"
    assert "every 7 steps" in change.tags["done"]


def test_costs_are_measured_by_name():
    with Training(every=1) as training:
        training.steps(3)
        found = {(p.name, p.kind): p for p in probes.found("^2")}
    assert found["2", "Activation"].seen == 3
    assert found["2", "Activation"].spent_ns > 0
    assert found["2.weight", "Weight"].seen == 4  # before the first step, too
    assert found["2.weight", "Weight"].every == 1


def test_catch_sites():
    with Training(every=0) as training:
        for step in range(6):
            tap.catch(step, "count")
            if step == 1:
                ask("^count$", every=0, steps=2)
            training.steps(1)
        (found,) = probes.found("^count$")
    assert (found.seen, found.every) == (6, 1)


def test_catch_sites_are_switched_off_and_on_again(open_run):
    for step in range(6):
        tap.catch(float(step), "count")
        if step == 1:
            ask("^count$", at=2, every=0, steps=2)
        tap.step()
    tap.finish()
    assert tap.open(open_run).get_all("count") == [0.0, 1.0, 4.0, 5.0]


def test_operations_of_one_step(open_run):
    with Training(every=0) as training:
        training.steps(1)
        ask(action="ops")
        training.steps(3)
    tap.finish()
    table = tap.open(open_run).stats()
    steps = table[table["kind"] == "Op"]["step"]
    assert set(steps) == {2}


def test_a_local_variable(open_run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 1)

        def forward(self, x):
            hidden = self.lin(x) * 2
            return hidden + 1

    with Training(Net(), every=0) as training:
        training.steps(1)
        (function,) = probes.found("forward")
        assert (function.name, function.kind, function.every) == ("forward", "Function", 0)
        ask("forward.hidden", action="trace", steps=2)
        training.steps(1)
        assert probes.found("forward")[0].every == 1
        training.steps(3)
        assert probes.found("forward")[0].every == 0
    tap.finish()
    found = tap.open(open_run).reader.records("forward.hidden")
    assert len(found) == 2


def test_rules_are_changed():
    with Training(every=1) as training:
        training.steps(1)
        assert training.tracker.alerts == []
        ask("nan", action="rules")
        training.steps(1)
        with torch.no_grad():
            training.net[2].weight.fill_(float("nan"))
        training.steps(1)
        assert training.tracker.alerts


def test_an_unknown_rule_is_refused_and_training_goes_on(open_run):
    with Training(every=1) as training:
        ask("nann", action="rules")
        training.steps(2)
    tap.finish()
    (change,) = tap.open(open_run).reader.records("tensortap.probe")
    assert "nan" in change.tags["done"]


def test_stop_needs_permission(monkeypatch):
    refused = probes.receive(ProbeRequest("stop", at=1), "", 0)
    assert "TENSORTAP_CONTROL=stop" in refused.refusal
    monkeypatch.setenv("TENSORTAP_CONTROL", "stop")
    with Training(every=0) as training:
        ask(action="stop", at=2, by="ada@host")
        with pytest.raises(StopTraining, match="ada@host"):
            training.steps(5)


def test_control_can_be_refused(monkeypatch):
    monkeypatch.setenv("TENSORTAP_CONTROL", "0")
    assert "TENSORTAP_CONTROL=0" in probes.receive(ProbeRequest(at=1), "", 0).refusal
    assert not probes.receive(None, "", 0).refusal  # looking is no control


@pytest.mark.parametrize("pattern", ["(", "(a+)+\\1", "(?=x)", "a{2000}"])
def test_hostile_patterns_are_refused(pattern):
    assert (
        "not a regular expression" in probes.receive(ProbeRequest(pattern=pattern), "", 0).refusal
    )
    assert "not a regular expression" in probes.receive(None, pattern, 0).refusal
    assert not probes.waiting


def test_jax():
    """From the step of the switch on, and with the same bits on both sides of it."""
    x = jnp.ones((2, 4))

    class Net(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            return flax.linen.Dense(2)(jnp.tanh(flax.linen.Dense(3)(x)))

    net = Net()
    params = net.init(jax.random.key(0), x)

    @jax.jit
    def update(params, x):
        grads = jax.grad(lambda p: (net.apply(p, x) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads

    plain = params
    for _ in range(7):
        plain, _ = update(plain, x)
    with tap.track(params, every=0) as tracker:
        for step in range(7):
            if step == 1:
                ask("Dense_0", at=3, tensors=True, steps=2)
            params, grads = tracker.intercept(update, params, x)
            tracker.step(params, grads=grads)
        found = tracker.records
    assert {r.step for r in found} == {3, 4}
    assert {r.name for r in found} >= {"Dense_0", "Dense_0.kernel"}
    assert not [r for r in found if "Dense_1" in r.name]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), plain, params))


def test_what_is_no_function_of_the_model_is_not_traced(open_run):
    with Training(every=0) as training:
        for path in ("forward.__globals__", "__class__.mro", "os.system", "0..", "\x1b[2J"):
            ask(path, action="trace")
            training.steps(1)
    tap.finish()
    changes = tap.open(open_run).reader.records("tensortap.probe")
    assert len(changes) == 5
    assert all(each.tags["done"].startswith(("refused", "failed")) for each in changes)


def test_compiled_in_probes_need_no_recompilation():
    from torch._dynamo.utils import counters

    net = model()
    with Training(
        net, torch.compile(net, backend="aot_eager", fullgraph=True), every=1
    ) as training:
        training.steps(2)
        graphs = counters["stats"]["unique_graphs"]
        ask("^2$", every=0)
        training.steps(2)
        ask("", every=0)
        training.steps(2)
        ask(action="reset")
        training.steps(2)
        outputs = training.seen(Kind.ACTIVATION)
        assert counters["stats"]["unique_graphs"] == graphs
    assert outputs[2] == outputs[7] == ["0", "1", "2", "Sequential"]
    assert outputs[3] == outputs[4] == ["0", "1", "Sequential"]
    assert not {5, 6} & set(outputs)


def test_a_model_compiled_without_probes_says_that_it_would_be_compiled_anew():
    net = model()
    with Training(net, torch.compile(net, backend="aot_eager"), every=0) as training:
        training.steps(2)
        ask("^2$")
        training.steps(2)
        assert training.seen() == {}
        ask("^2$", recompile=True)
        training.steps(2)
        assert training.seen(Kind.ACTIVATION) == {5: ["2"]}
        ask("^0$")  # compiled in by now
        training.steps(2)
        assert training.seen(Kind.ACTIVATION)[7] == ["0", "2"]
