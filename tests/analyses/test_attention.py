"""Logits and entropy of attention in models that call `scaled_dot_product_attention`."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tensortap as tap
from tensortap.rooms.analyses.numbers import head_statistics
from tensortap.rooms.analyses.torch import attention
from tensortap.rooms.analyses.torch.attention import attention_logits, sample_queries
from tensortap.rooms.track.torch import reading

CLOSE = 1e-12


class Attend(nn.Module):
    """Attention with projections; options are those of the function."""

    def __init__(self, heads=4, shared=4, **options):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.shared, self.options = heads, shared, options
        self.query = nn.Linear(16, 16)
        self.key = nn.Linear(16, 16 // heads * shared)

    def forward(self, x):
        q = self.q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k = self.key(x).unflatten(-1, (self.shared, -1)).transpose(1, 2)
        return functional.scaled_dot_product_attention(q, k, k, **self.options)


class Model(nn.Module):
    def __init__(self, *args, **options):
        super().__init__()
        self.layers = nn.ModuleList(Attend(*args, **options) for _ in range(2))

    def forward(self, x):
        return sum(layer(x).mean() for layer in self.layers)


def train(net, steps=2, shape=(2, 9, 16), **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with tap.track(net, optimizer, **options) as tracker:
        for step in range(steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            out = net(torch.randn(shape))
            (out if out.ndim == 0 else out.square().mean()).backward()
            optimizer.step()
            tracker.step()
    return tracker


def numbers(tracker, name):
    frame = tracker.logframe()
    chosen = frame["metadata"]["name"] == name
    return frame[chosen & (frame["metadata"]["tensor_type"] == "Activation")]["scalar_stats"]


def plain(q, k, scale, mask=None):
    """Return the largest logit and the mean entropy per head, from the whole matrix."""
    q, k = q.detach().double(), k.detach().double()
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    p = logits.softmax(-1)
    entropy = -torch.where(p > 0, p * p.log(), 0.0).sum(-1)
    return logits.amax((0, 2, 3)).numpy(), entropy.mean((0, 2)).numpy()


def assert_heads(row, expected):
    largest, entropy = expected
    found = [row[f"max_logit_{head}"] for head in range(len(largest))]
    np.testing.assert_allclose(found, largest, rtol=CLOSE)
    found = [row[f"entropy_{head}"] for head in range(len(largest))]
    np.testing.assert_allclose(found, entropy, rtol=CLOSE)
    assert row["max_logit"] == max(row[f"max_logit_{head}"] for head in range(len(largest)))
    assert row["entropy"] == pytest.approx(entropy.mean(), rel=CLOSE)


BIAS = torch.linspace(-1, 1, 81, dtype=torch.float64).reshape(9, 9)
SEEN = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.6
SEEN[..., 0] = True


@pytest.mark.parametrize(
    ("options", "scale", "mask"),
    [
        ({}, 0.5, None),
        ({"scale": 0.25}, 0.25, None),
        ({"is_causal": True}, 0.5, torch.tril(torch.ones(9, 9, dtype=torch.bool))),
        ({"attn_mask": SEEN}, 0.5, SEEN),
        ({"attn_mask": BIAS.float(), "dropout_p": 0.2}, 0.5, BIAS.float().double()),
    ],
)
def test_fused_attention(options, scale, mask):
    net = Model(**options)
    tracker = train(net, analyses=["attention"])
    for i, layer in enumerate(net.layers):
        row = numbers(tracker, f"layers.{i}").iloc[1]
        assert_heads(row, plain(layer.q, layer.k, scale, mask))


def test_heads_that_share_keys():
    net = Model(4, 2, enable_gqa=True)
    tracker = train(net, analyses=["attention"])
    layer = net.layers[1]
    assert_heads(numbers(tracker, "layers.1").iloc[1], plain(layer.q, layer.k, 0.5))


def test_long_sequences_are_sampled():
    net = Model(is_causal=True)
    tracker = train(net, shape=(6, 70, 16), analyses=["attention"])
    layer = net.layers[0]
    picked, at = [0, 1, 3, 5], [i * 69 // 15 for i in range(16)]
    mask = torch.tril(torch.ones(70, 70, dtype=torch.bool))[at]
    expected = plain(layer.q[picked][:, :, at], layer.k[picked], 0.5, mask)
    assert_heads(numbers(tracker, "layers.0").iloc[1], expected)


def test_queries_that_see_no_key_do_not_count():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 6, 9, 8)), rng.standard_normal((2, 3, 11, 8))
    mask = np.ones((2, 6, 9, 11), bool)
    mask[1, 2, 3:] = False
    mask[:, 4] = False
    found = head_statistics(attention_logits(q, k, 1.0, mask))
    rows = [q[b, 2, i] @ k[b, 1].T for b, i in np.ndindex(2, 9) if b == 0 or i < 3]
    p = [np.exp(row) / np.exp(row).sum() for row in rows]
    assert found.entropy[2] == pytest.approx(
        np.mean([-(x * np.log(x)).sum() for x in p]), rel=CLOSE
    )
    assert np.isneginf(found.max_logit[4])
    assert np.isnan(found.entropy[4])


@pytest.mark.parametrize(("sequences", "length"), [(1, 1), (1, 500), (3, 500), (100, 7), (0, 4)])
def test_the_sample_is_bounded(sequences, length):
    sample = sample_queries(sequences, length)
    assert len(sample.sequences) * len(sample.positions) <= 64
    assert len(set(sample.positions.tolist())) == len(sample.positions) <= length
    assert len(sample.sequences) == min(sequences, 4)


class Checkpointed(Model):
    def forward(self, x):
        x.requires_grad_()  # which the reentrant one needs
        return sum(
            checkpoint(layer, x, use_reentrant=i == 0).mean() for i, layer in enumerate(self.layers)
        )


@pytest.mark.parametrize("cls", [Model, Checkpointed])
def test_training_is_bit_identical(cls):
    plain_net, seen = cls(dropout_p=0.3), cls(dropout_p=0.3)
    train(plain_net, 4)
    tracker = train(seen, 4, every=2, exclude="layers.1", analyses=["attention"])
    pairs = zip(plain_net.parameters(), seen.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not tracker.unseen
    assert {name for name, _ in health(tracker)} >= {"layers.0.max_logit", "layers.0.entropy_3"}
    assert not any(name.startswith("layers.1") for name, _ in health(tracker))
    assert {step for _, step in health(tracker)} == {2}  # the first pass runs without the mode


def test_a_forward_pass_that_raises_leaves_no_mode():
    net = Model()
    tracker = tap.track(net, analyses=["attention"])
    with tracker:
        for shape in ((2, 9, 16), (2, 9, 5), (2, 9, 16)):
            try:
                net(torch.randn(shape)).backward()
            except RuntimeError:
                assert shape[-1] == 5
            assert not torch.overrides.has_torch_function((object(),))
            tracker.step()
    assert {step for _, step in health(tracker)} == {2}


def test_multihead_attention_is_reported():
    net = nn.Sequential(nn.TransformerEncoderLayer(16, 4, batch_first=True))
    tracker = train(net, analyses=["attention"])
    assert "nn.MultiheadAttention is not analyzed" in tracker.unseen["attention"]
    assert not health(tracker)


def test_an_error_does_not_reach_the_training(monkeypatch):
    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(attention, "sample_queries", broken)
    before = tap.receipt().dropped
    train(Model(), analyses=["attention"])
    assert tap.receipt().dropped != before


@pytest.mark.slow
def test_attention_on_a_device(monkeypatch):
    """The device is replaced: tensors of the host are read as if they were on one."""
    here = train(Model(), analyses=["attention"])
    monkeypatch.setattr(attention, "is_here", lambda tensor: False)
    monkeypatch.setattr(reading, "is_here", lambda tensor: False)
    away = train(Model(), analyses=["attention"])
    assert not away.unseen
    found, expected = ([(r.name, r.value) for r in t.records if r.kind == "Health"]
                       for t in (away, here))  # fmt: skip
    assert found == expected != []
    monkeypatch.setattr(reading, "why_not", lambda tensor: "captured")
    unread = train(Model(), analyses=["attention"])
    assert "the host cannot read" in unread.unseen["attention"]
    assert not [r for r in unread.records if r.kind == "Health"]


class Block(nn.Module):
    """A block of a GPT, whose attention is computed between two of its modules."""

    def __init__(self, **options):
        super().__init__()
        self.norm, self.attend, self.out = nn.LayerNorm(16), Attend(**options), nn.Linear(16, 16)

    def forward(self, x):
        return x + functional.gelu(self.out(self.attend(self.norm(x)).transpose(1, 2).flatten(2)))


class GPT(nn.Module):
    def __init__(self, layers=2, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(layers))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def health(tracker):
    return {(r.name, r.step): r.value for r in tracker.records if r.kind == "Health"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch
@pytest.mark.parametrize("way", ["whole", "function"])
def test_compiled_models_are_compiled_as_without_attention(way, monkeypatch):
    def net():
        torch._dynamo.reset()
        if way == "function":  # a compiled part that is no module
            fused = torch.compile(functional.gelu, backend="aot_eager", fullgraph=True)
            monkeypatch.setattr(functional, "gelu", fused)
            return GPT()
        return torch.compile(GPT(), backend="aot_eager", fullgraph=True)

    found = []
    for selected in ({}, {"every": 2, "analyses": ["activations", "attention"]}):
        torch._dynamo.utils.counters.clear()
        with monkeypatch.context() as monkeypatch:
            model = net()
            tracker = train(model, 5, **selected)
        counters = torch._dynamo.utils.counters
        assert not counters["graph_break"]
        found.append((counters["stats"]["unique_graphs"], list(model.parameters())))
    assert found[0][0] == found[1][0] > 0
    assert all(map(torch.equal, found[0][1], found[1][1]))
    assert "compiled parts" in tracker.unseen["attention"]
    assert not any("entropy" in name for name, _ in health(tracker))
