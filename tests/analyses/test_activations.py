"""Numbers about the outputs of layers, against plain formulas in the LogFrame of a run."""

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.rooms.analyses.activations import OUTLIER, WINDOW

CLOSE = 1e-12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(2, 5, 3)
        self.body = nn.Sequential(nn.Linear(8, 12), nn.ReLU())
        with torch.no_grad():
            self.body[0].weight[3] *= 300
            self.body[0].bias[7] = -1e6  # a unit that no input activates
            self.body[0].bias[3] = 0

    def forward(self, x):
        convolved, hidden = self.conv(x), self.body(x.flatten(1, -1)[:, :8])
        if not torch.compiler.is_compiling():
            self.convolved, self.hidden = convolved, hidden
        return hidden.mean() + convolved.square().mean()


def train(net, steps, calls=1, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    with tap.track(net, optimizer, **options) as tracker:
        for step in range(steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            for _ in range(calls):
                net(torch.randn(50, 2, 6)).backward()
            optimizer.step()
            tracker.step()
    return tracker


def rows(tracker, name):
    frame = tracker.logframe()
    metadata = frame["metadata"]
    chosen = (metadata["name"] == name) & (metadata["tensor_type"] == "Activation")
    return frame[chosen & (metadata["call"] == 0)]["scalar_stats"]


def test_numbers_about_a_layer(tmp_path):
    net = Net()
    tracker = train(net, 1, analyses=["activations"], to=tmp_path)
    x = net.hidden.detach().double().numpy()
    row = rows(tap.open(tracker.path), "body").iloc[0]
    d = x - x.mean()
    assert row["kurtosis"] == pytest.approx((d**4).mean() / (d**2).mean() ** 2, rel=CLOSE)
    rms = np.sqrt((x**2).mean(axis=0))
    ratios = rms / np.median(rms[rms > 0])
    assert row["outlier_channels"] == (ratios >= OUTLIER).sum() == 1
    assert row["outlier_channel"] == 3
    assert row["outlier_ratio"] == pytest.approx(ratios[3], rel=CLOSE)
    assert row["outlier_persistence"] == 1
    assert row["zero_channels"] == (x == 0).all(axis=0).sum() == 1
    sizes = np.linalg.svd(x[[i * 49 // 31 for i in range(32)]], compute_uv=False)
    share = sizes / sizes.sum()
    share = share[share > 0]
    rank = np.exp(-(share * np.log(share)).sum())
    assert row["effective_rank"] == pytest.approx(rank, rel=CLOSE)
    # the container returns what its last module returned
    last = rows(tap.open(tracker.path), "body.1").iloc[0]
    assert row.drop(["effective_rank"]).equals(last.drop(["effective_rank"]))


def test_channels_of_convolutions_are_the_second_dimension():
    net = Net()
    row = rows(train(net, 1, analyses=["activations"]), "conv").iloc[0]
    x = net.convolved.detach().double().numpy()
    rms = np.sqrt((x**2).mean(axis=(0, 2)))
    assert row["outlier_ratio"] == pytest.approx(rms.max() / np.median(rms), rel=CLOSE)


def test_dead_channels_are_zero_in_all_steps_of_the_window():
    net = Net()
    found = rows(train(net, 2 * WINDOW + 1, every=2, analyses=["activations"]), "body")
    assert found["dead_channels"].tolist() == [0.0] * (WINDOW - 1) + [1.0] * 2
    assert found["zero_channels"].min() == 1


def test_a_channel_that_only_one_call_activates_is_not_dead():
    net = Net()
    calls = []

    def silence(module, args, output):
        calls.append(output)
        return output * 0 if len(calls) % 2 else output

    net.body[0].register_forward_hook(silence)
    found = rows(train(net, 1, calls=2, analyses=["activations"]), "body").iloc[0]
    assert found["zero_channels"] == 1
    assert np.isnan(found["kurtosis"])  # of the first call, which is all 0
    assert found["effective_rank"] == 0


def test_names_are_selected():
    tracker = train(Net(), 1, exclude={"health": "conv"}, analyses=["activations"])
    assert rows(tracker, "conv")["kurtosis"].isna().all()
    assert rows(tracker, "body")["kurtosis"].notna().all()


@pytest.mark.slow
def test_outputs_in_compiled_graphs():
    net, other = Net(), Net()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    found = [
        rows(train(each, 2, every=2, analyses=["activations"]), "body")
        for each in (compiled, other)
    ]
    assert len(found[0]) == 1
    assert found[0]["kurtosis"].tolist() == pytest.approx(found[1]["kurtosis"].tolist(), rel=1e-5)
