"""Norms, updates and noise of a torch model, against float64."""

import collections
import math

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.core.record import Kind
from tensortap.rooms.analyses import parameters
from tensortap.rooms.analyses.parameters import estimate
from tensortap.rooms.analyses.torch import analyzed
from tensortap.rooms.track.torch import reading

pytestmark = pytest.mark.usefixtures("no_errors")

EXACT = {"rel": 1e-12, "abs": 0.0}


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        collections.OrderedDict(
            embed=nn.Embedding(7, 8), block=nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
            head=nn.Linear(8, 3),
        )
    ).to(dtype)  # fmt: skip


class Reference:
    """Copies of what a step did, and what follows from them in float64."""

    def __init__(self, model):
        self.model = model
        self.single, self.computed, self.used, self.old, self.new = [], {}, {}, {}, {}

    def copies(self, of):
        return {
            name: of(p).detach().double().numpy().ravel().copy()
            for name, p in self.model.named_parameters()
        }

    def backward(self, loss):
        added = {}
        hooks = [
            p.register_hook(lambda g, p=p: added.__setitem__(p, g.clone()))
            for p in self.model.parameters()
        ]
        loss.backward()
        for hook in hooks:
            hook.remove()
        self.computed = self.copies(lambda p: p.grad)
        self.single.append(self.copies(added.__getitem__))

    def step(self, optimizer):
        self.used, self.old = self.copies(lambda p: p.grad), self.copies(lambda p: p)
        optimizer.step()
        self.new = self.copies(lambda p: p)


def train(model, optimizer, steps, micro=1, clip=None, **options):
    """Train, and return the tracker and the reference of every step."""
    torch.manual_seed(1)
    references = []
    with tap.track(model, optimizer, **options) as tracker:
        for _ in range(steps):
            reference = Reference(model)
            references.append(reference)
            optimizer.zero_grad()
            for _ in range(micro):
                loss = model(torch.randint(7, (4, 5))).square().mean() / micro
                reference.backward(loss)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            reference.step(optimizer)
            tracker.step()
    return tracker, references


def numbers(tracker, step):
    found = {r.name: r.value for r in tracker.records if r.kind is Kind.HEALTH and r.step == step}
    assert found
    return found


def norm(arrays):
    return math.sqrt(sum(float(a @ a) for a in arrays))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_before_and_after_clipping(dtype):
    model = net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tracker, steps = train(model, optimizer, 3, micro=2, clip=0.01, analyses=["norms"])
    for number, step in enumerate(steps):
        found = numbers(tracker, number)
        assert found["model.grad_norm"] == pytest.approx(norm(step.computed.values()), **EXACT)
        assert found["model.grad_norm_used"] == pytest.approx(norm(step.used.values()), **EXACT)
        assert found["model.weight_norm"] == pytest.approx(norm(step.new.values()), **EXACT)
        assert found["model.grad_norm"] > 2 * found["model.grad_norm_used"]
        block = [g for n, g in step.computed.items() if n.startswith("block.0.")]
        assert found["block.0.grad_norm"] == found["block.grad_norm"]
        assert found["block.grad_norm"] == pytest.approx(norm(block), **EXACT)
        for name in step.computed:
            for quantity, arrays in (
                ("grad_norm", step.computed), ("grad_norm_used", step.used),
                ("weight_norm", step.new),
            ):  # fmt: skip
                assert found[f"{name}.{quantity}"] == pytest.approx(norm([arrays[name]]), **EXACT)


def test_updates():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tracker, steps = train(model, optimizer, 5, every=2, analyses=["norms", "updates"])
    for number in (0, 2, 4):
        found, this = numbers(tracker, number), steps[number]
        moved = {n: this.new[n] - this.old[n] for n in this.new}
        for name, update in moved.items():
            ratio = math.log10(norm([update]) / norm([this.new[name]]))
            assert found[f"{name}.update_norm"] == pytest.approx(norm([update]), **EXACT)
            assert found[f"{name}.update_ratio"] == pytest.approx(ratio, rel=1e-12, abs=1e-12)
        total = norm(moved.values()) / norm(this.new.values())
        assert found["model.update_ratio"] == pytest.approx(math.log10(total), **EXACT)


def test_noise_of_micro_batches():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tracker, steps = train(model, optimizer, 4, micro=4, clip=1e-3, analyses=["noise"])
    averages = collections.defaultdict(list)
    for number, step in enumerate(steps):
        found = numbers(tracker, number)
        signal = noise = 0.0
        for name, total in step.computed.items():
            single = np.mean([float(each[name] @ each[name]) for each in step.single])
            each = estimate(single, float(total @ total) / 16, 4)
            signal, noise = signal + each.signal, noise + each.noise
            averages[name].append(each)
            mean = _average(averages[name])
            assert found[f"{name}.grad_snr"] == pytest.approx(mean[0] / mean[1], **EXACT)
        averages[""].append((signal, noise))
        mean = _average(averages[""])
        assert found["model.grad_noise"] == pytest.approx(noise, **EXACT)
        assert found["model.grad_signal"] == pytest.approx(signal, **EXACT)
        assert found["model.noise_scale"] == pytest.approx(mean[1] / mean[0], **EXACT)


def _average(found):
    mean = np.array(found[0])
    for each in found[1:]:
        mean = 0.9 * mean + 0.1 * np.array(each)
    return mean


def test_estimates_of_noise_are_unbiased():
    rng = np.random.default_rng(0)
    truth, noise, samples = np.array([0.5, -1.0, 0.25]), 0.7, 4
    gradients = truth + noise * rng.standard_normal((20_000, samples, 3))
    single = (gradients**2).sum(2).mean(1)
    mean = (gradients.mean(1) ** 2).sum(1)
    found = [estimate(a, b, samples) for a, b in zip(single, mean, strict=True)]
    assert np.mean([each.signal for each in found]) == pytest.approx(truth @ truth, rel=0.02)
    assert np.mean([each.noise for each in found]) == pytest.approx(3 * noise**2, rel=0.02)


def test_one_gradient_says_nothing_about_noise():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tracker, _ = train(model, optimizer, 2, analyses=["noise"])
    assert not [r for r in tracker.records if r.kind is Kind.HEALTH]


def test_a_closure_computes_the_gradients_within_the_step():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    tokens = torch.randint(7, (4, 5))

    def closure():
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        return loss

    with tap.track(model, optimizer, analyses=["norms", "updates"]) as tracker:
        for _ in range(2):
            optimizer.step(closure)
            tracker.step()
    found = numbers(tracker, 1)
    expected = norm([p.grad.double().numpy().ravel() for p in model.parameters()])
    assert found["model.grad_norm_used"] == pytest.approx(expected, **EXACT)
    assert found["model.update_norm"] == pytest.approx(0.01 * expected, rel=1e-4)


def test_copies_are_bounded(monkeypatch):
    model = net()
    monkeypatch.setattr(parameters, "LARGEST", model.embed.weight.nbytes)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    tracker, _ = train(model, optimizer, 2, analyses=["updates"])
    updated = [name for name in numbers(tracker, 1) if name.endswith(".update_norm")]
    assert updated == ["embed.weight.update_norm", "model.update_norm"]
    assert "copies are bounded" in tracker.unseen["updates"]


def test_a_compiled_model_is_analyzed():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    compiled = torch.compile(model, backend="aot_eager")
    tracker, steps = train(
        compiled, optimizer, 2, micro=2, clip=0.01, analyses=["norms", "updates", "noise"],
        kind=("weight", "optimizer_state"),
    )  # fmt: skip
    found, step = numbers(tracker, 1), steps[1]
    assert found["model.grad_norm"] == pytest.approx(norm(step.computed.values()), **EXACT)
    assert found["model.grad_norm_used"] == pytest.approx(norm(step.used.values()), **EXACT)
    assert found["model.noise_scale"]


def test_parameters_on_a_device(monkeypatch):
    """The device is replaced: tensors of the host are read as if they were on one."""

    def numbers_of():
        torch.manual_seed(5)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        analyses = ["norms", "updates", "noise", "activations"]
        tracker, _ = train(model, optimizer, 2, analyses=analyses)
        return tracker.unseen, [(r.name, r.step, r.value) for r in tracker.records
                                if r.kind is Kind.HEALTH]  # fmt: skip

    here = numbers_of()
    for module in (reading, analyzed):
        monkeypatch.setattr(module, "is_here", lambda tensor: False)
    assert numbers_of() == here != ({}, [])
    monkeypatch.setattr(analyzed, "MOST_COPIED", 100)
    unseen, found = numbers_of()
    assert "MiB that are copied" in unseen["analyses"]
    assert not [name for name, _, _ in found if "norm" in name]  # of all parameters, or of none


def test_without_an_optimizer_only_gradients_are_known():
    model = net()
    with tap.track(model, analyses=["norms"]) as tracker:
        model(torch.randint(7, (4, 5))).square().mean().backward()
        tracker.step()
    found = numbers(tracker, 0)
    assert "model.grad_norm" in found
    assert "model.weight_norm" not in found
    assert "pass the optimizer" in tracker.unseen["analyses"]
