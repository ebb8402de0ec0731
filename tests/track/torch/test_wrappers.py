"""Wrappers around a model: checkpoints."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tap
from tensortap.alerts import nan
from tensortap.core.record import Kind

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_errors"),
    # a warning of the compiler itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

ACT, GRAD, WEIGHT, WGRAD = (
    Kind.ACTIVATION, Kind.GRADIENT, Kind.WEIGHT, Kind.WEIGHT_GRADIENT,
)  # fmt: skip


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


# -- activation checkpointing --------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
def test_script_modules_are_unseen():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tap.track(model, optimizer=optimizer, alerts=True, analyses=True) as tracker:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        tracker.step()
    assert "ScriptModule" in tracker.unseen["1"]
    seen = {(r.kind, r.name) for r in tracker.records}
    assert {(Kind.ACTIVATION, "0"), (Kind.WEIGHT_GRADIENT, "1.weight")} <= seen


def test_sparse_gradients_are_recorded_by_their_values():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters())
    with tap.track(model, optimizer=optimizer) as tracker:
        model(torch.tensor([1, 2, 2])).sum().backward()
        optimizer.step()
        tracker.step()
    (record,) = (r for r in tracker.records if r.kind is WGRAD)
    assert record.shape == (2, 3)
    assert (record.stats.min, record.stats.max) == (1, 2)
    assert "5x3" in record.tags["sparse"]


class Checkpointed(nn.Module):
    def __init__(self, reentrant, on=True):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(mlp() for _ in range(3))
        self.reentrant, self.on = reentrant, on

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.on else block(x)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_outputs_are_tagged(reentrant, found):
    frames, gradients = [], []
    for on in (False, True):
        model = Checkpointed(reentrant, on)
        with tap.track(model) as tracker:
            for n in range(2):
                for m in range(2):  # each call is recomputed under its own index
                    x = torch.full((2, 4), n + m + 1.0, requires_grad=True)
                    model(x).square().sum().backward()
                model.zero_grad()
                tracker.step()
        seen = found(tracker)
        gradients.append({(r.name, r.step, r.call): r.stats for r in seen.of(GRAD)})
        assert len(gradients[-1]) == len(seen.of(GRAD)) == 13 * 4
        frame = tracker.logframe()
        frames.append(frame[frame["metadata"]["tensor_type"].eq("Activation")])
    assert gradients[0] == gradients[1]
    again = [r for r in seen.of(ACT) if r.tags.get("recompute")]
    assert again
    first = {(r.name, r.step, r.call): r.stats for r in seen.of(ACT) if not r.tags}
    assert len(first) == 13 * 4
    for record in again:
        assert record.stats == first[record.name, record.step, record.call]
    assert len(frames[0]) == len(frames[1]) == 13 * 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_outputs_raise_no_second_alert(reentrant):
    model = Checkpointed(reentrant)
    model.blocks[1].register_forward_hook(lambda m, a, out: out * torch.nan)
    with tap.track(model, alerts=[nan()]) as tracker:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        tracker.step()
    assert [alert.name for alert in tracker.alerts if alert.kind is ACT] == ["blocks.1"]
