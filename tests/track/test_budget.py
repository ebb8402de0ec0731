"""A budget: every tensor is seen, in turns, and what was not looked at has no record."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.capture.pipeline import pipeline
from tensortap.core.record import Kind
from tensortap.rooms.track.batches import Costs
from tensortap.rooms.track.budget import Budget, parse_budget
from tensortap.rooms.track.observing import Observed


def simulated(share, costs_ns, steps, step_ns=10_000_000, fixed_ns=0):
    """Steps whose looks cost what is said, by a clock of its own; what each step looked at."""
    costs = Costs()
    budget = Budget(share, costs)
    keys = {(Kind.WEIGHT, name): cost for name, cost in costs_ns.items()}
    budget.names = lambda: keys
    now, spent, seen = 1, 0, []
    budget.begin_step(0)
    for step in range(steps):
        seen.append([name for _, name in budget.chosen])
        looks = [keys[key] for key in budget.chosen]
        costs.add([Observed(name, kind) for kind, name in budget.chosen], looks)
        cost = sum(looks) + fixed_ns
        spent += cost * (step > 3)  # the first four look at everything
        now += step_ns + cost
        budget.begin_step(step + 1)
        budget.end_step(now, fixed_ns)
    whole = [*seen[:4], *(seen[step] for step in (10, 30, 100, 300, 1000) if step < steps)]
    assert all(sorted(each) == sorted(costs_ns) for each in whole)
    return spent / (steps * step_ns), seen


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_the_cost_stays_within_the_share(share):
    costs = {f"w{i}": 20_000 + 7_000 * i for i in range(50)}
    spent, seen = simulated(share, costs, 2000)
    assert 0.75 * share < spent <= share  # the rest is for what nobody measures
    counts = [sum(name in step for step in seen) for name in costs]
    assert max(counts) - min(counts) <= 1  # those that were seen longest ago come first


def test_a_look_that_costs_more_than_a_step_earns_waits_for_more_steps():
    spent, seen = simulated(0.01, {"huge": 3_000_000, "small": 10_000}, 2000)
    assert sum("huge" in step for step in seen) > 3
    assert spent <= 0.01


def test_tells_how_often_the_norm_of_all_gradients_fits():
    costs, now, normed = Costs(), 1, 0
    budget = Budget(0.01, costs)
    budget.names = lambda: ()
    for step in range(2000):
        spent = 1_000_000 if budget.checks else 0
        if spent:
            budget.checked(spent)
            costs.spend(spent)
        normed += spent > 0
        now += 10_000_000 + spent
        budget.begin_step(step)
        budget.end_step(now, 0)
    assert budget.norm_period > 5
    assert normed == pytest.approx(2000 / budget.norm_period, rel=0.2)


def test_looks_have_a_quarter_of_a_budget_that_the_steps_alone_exceed():
    costs = {f"w{i}": 20_000 for i in range(10)}
    spent, seen = simulated(0.01, costs, 4000, fixed_ns=150_000)
    assert 0.15 < (spent - 0.015) / 0.01 < 0.25
    assert all(sum(name in step for step in seen) > 30 for name in costs)


def test_shares():
    assert parse_budget("2.5%") == 0.025
    for wrong in ("0", "-1%", "fast", 2, "200%"):
        with pytest.raises(ValueError, match="budget must be a share"):
            parse_budget(wrong)


def test_the_environment_sets_it(monkeypatch):
    monkeypatch.setenv("TENSORTAP_BUDGET", "3%")
    assert tap.track(nn.Linear(1, 1))._observer.plan.budget.share == 0.03


def train(steps, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(net.parameters())
    with tap.track(net, optimizer, **options) as tracker:
        for step in range(steps):
            optimizer.zero_grad()
            net(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
            tracker.step(loss=step)
    return tracker, [p.detach().clone() for p in net.parameters()]


class _Priced(dict):
    """Costs of looks that are always the same."""

    def get(self, key, default=None):
        return 20_000


def test_every_tensor_is_seen_and_none_in_every_step(monkeypatch):
    end_step, checked = Budget.end_step, Budget.checked

    def end_step_by_a_clock(self, now, spent):  # steps take a millisecond, however busy the machine
        self._costs.usual = _Priced()
        end_step(self, self._begun * 1_000_000, 0)

    monkeypatch.setattr(Budget, "end_step", end_step_by_a_clock)
    monkeypatch.setattr(Budget, "checked", lambda self, spent: checked(self, 10_000))
    monkeypatch.setattr(pipeline, "thread_ns", lambda: 0)
    tracker, bits = train(150, budget="20%")
    everything, plain = train(2)[0], train(150)[1]
    names = {(r.kind, r.name) for r in everything.records}
    whole = {*range(-1, 4), 10, 30, 100}
    seen = [(r.kind, r.name) for r in tracker.records if r.step not in whole]
    assert names <= set(seen)
    assert len(seen) < 150 * len(names)
    for name in ("loss", "gradient_norm"):
        assert [r.step for r in tracker.records if r.name == name] == list(range(150))
    by_step = {}
    for r in everything.records:
        if r.kind is Kind.WEIGHT_GRADIENT:
            by_step.setdefault(r.step, []).append(r.stats.count * r.stats.rm2**2)
    norms = {r.step: r.value for r in tracker.records if r.name == "gradient_norm"}
    assert all(norms[step] == pytest.approx(sum(found) ** 0.5) for step, found in by_step.items())
    assert all(torch.equal(a, b) for a, b in zip(bits, plain, strict=True))


def test_an_alert_lifts_the_budget_for_its_module():
    budget = Budget(1e-9, Costs())
    budget.names = lambda: [(Kind.WEIGHT, "a.weight"), (Kind.ACTIVATION, "a"), (Kind.WEIGHT, "b")]
    assert all(map(budget.begin_step, range(4)))
    assert not budget.begin_step(4)
    budget.lift("a", 4)
    for step in (5, 6, 7):
        assert budget.begin_step(step)
        assert set(budget.chosen) == {(Kind.WEIGHT, "a.weight"), (Kind.ACTIVATION, "a")}
    assert not budget.begin_step(8)
    budget.lift("", 8)
    assert budget.begin_step(9)
    assert len(budget.chosen) == 3


@pytest.mark.parametrize("name", [None, "second"])
def test_a_layer_that_dies_within_a_budget_is_seen_again_soon(name):
    """A rule wants three looks in a row: the second and third one do not wait for their turn."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(30)))
    with tap.track(net, budget="20%", alerts=True, kind="activation", name=name) as tracker:
        budget = tracker._observer.plan.budget
        for step in range(200):
            if step == 40:
                with torch.no_grad():
                    net[20][0].bias.fill_(-50.0)
            net(torch.rand(4, 8))
            budget._saved = budget._needed  # a few looks per step
            tracker.step()
    relu = f"{name}.20.1" if name else "20.1"
    looks = sorted({r.step for r in tracker.records if r.name == relu and r.step >= 40})
    (alert,) = (a for a in tracker.alerts if a.rule == "dead" and a.name == relu)
    assert alert.step == looks[2] < looks[0] + 8
