"""Logits and entropy of attention: however a torch model computes it."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import tensortap as tap
from tensortap.frameworks.torch import attention, host

CLOSE = 1e-12


class Attend(nn.Module):
    """Attention with projections, in one of several ways."""

    def __init__(self, heads=4, shared=4, way="fused", **options):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.shared, self.way, self.options = heads, shared, way, options
        self.query = nn.Linear(16, 16)
        self.key = nn.Linear(16, 16 // heads * shared)

    def forward(self, x):
        q = self.q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k = self.key(x).unflatten(-1, (self.shared, -1)).transpose(1, 2)
        if self.way == "fused":
            return functional.scaled_dot_product_attention(q, k, k, **self.options)
        scores = q @ k.transpose(-1, -2) / 2
        p = {
            "function": lambda: functional.softmax(scores, dim=-1),
            "method": lambda: scores.softmax(-1),
            "torch": lambda: torch.softmax(scores, dim=3),
        }[self.way]()
        return p @ k


class Model(nn.Module):
    def __init__(self, *args, **options):
        super().__init__()
        self.layers = nn.ModuleList(Attend(*args, **options) for _ in range(2))

    def forward(self, x):
        return sum(layer(x).mean() for layer in self.layers)


def train(net, steps=1, shape=(2, 9, 16), **options):
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
        row = numbers(tracker, f"layers.{i}").iloc[0]
        assert_heads(row, plain(layer.q, layer.k, scale, mask))


def test_heads_that_share_keys():
    net = Model(4, 2, enable_gqa=True)
    tracker = train(net, analyses=["attention"])
    layer = net.layers[1]
    assert_heads(numbers(tracker, "layers.1").iloc[0], plain(layer.q, layer.k, 0.5))


@pytest.mark.parametrize("way", ["function", "method", "torch"])
def test_attention_with_a_softmax_of_its_own(way):
    net = Model(way=way)
    tracker = train(net, analyses=["attention"])
    layer = net.layers[0]
    row = numbers(tracker, "layers.0").iloc[0]
    logits = (layer.q @ layer.k.transpose(-1, -2) / 2).detach().double()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean((0, 2))
    assert_heads(row, (logits.amax((0, 2, 3)).numpy(), entropy.numpy()))


class Multihead(nn.Module):
    def __init__(self, weights):
        super().__init__()
        torch.manual_seed(0)
        self.weights = weights
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.weights)[0]


@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention(weights):
    net = Multihead(weights)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    tracker = train(net, analyses=["attention"])
    (row,) = [row for _, row in numbers(tracker, "attention[0]").iterrows()]
    torch.manual_seed(0)
    projected = functional.linear(
        torch.randn(2, 9, 16), before["attention.in_proj_weight"], before["attention.in_proj_bias"]
    )
    q, k, _ = projected.unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    largest, entropy = plain(q, k, 0.5)
    np.testing.assert_allclose([row[f"max_logit_{h}"] for h in range(4)], largest, rtol=1e-5)
    np.testing.assert_allclose([row[f"entropy_{h}"] for h in range(4)], entropy, rtol=1e-5)


def test_long_sequences_are_sampled():
    net = Model(is_causal=True)
    tracker = train(net, shape=(6, 70, 16), analyses=["attention"])
    layer = net.layers[0]
    picked, at = [0, 1, 3, 5], [i * 69 // 15 for i in range(16)]
    mask = torch.tril(torch.ones(70, 70, dtype=torch.bool))[at]
    expected = plain(layer.q[picked][:, :, at], layer.k[picked], 0.5, mask)
    assert_heads(numbers(tracker, "layers.0").iloc[0], expected)


def test_training_is_bit_identical_and_functions_are_put_back():
    functions = (
        functional.scaled_dot_product_attention, torch.softmax, torch.Tensor.__dict__.get("softmax")
    )  # fmt: skip
    plain_net, seen = Model(dropout_p=0.3), Model(dropout_p=0.3)
    train(plain_net, 3)
    tracker = train(seen, 3, every=2, exclude="layers.1", analyses=["attention"])
    pairs = zip(plain_net.parameters(), seen.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    now = functional.scaled_dot_product_attention, torch.softmax
    assert now == functions[:2]
    assert torch.Tensor.__dict__.get("softmax") is functions[2]
    assert numbers(tracker, "layers.0")["max_logit"].notna().tolist() == [True, True]
    health = {record.name for record in tracker.records if record.kind == "Health"}
    assert not any(name.startswith("layers.1") for name in health)


def test_two_models_at_the_same_time():
    first, second = Model(), Model(8, 8)
    one = tap.track(first, name="one", analyses=["attention"])
    two = tap.track(second, name="two", analyses=["attention"])
    with one, two:
        for net in (first, second):
            net(torch.randn(2, 5, 16)).backward()
        one.step()
        two.step()
        names = [{r.name for r in each.records if "entropy_" in r.name} for each in (one, two)]
    assert all(name.startswith("one.layers.") for name in names[0])
    assert [len(found) for found in names] == [2 * 4, 2 * 8]
    assert not hasattr(torch.softmax, "tensortap_original")


def test_an_error_does_not_reach_the_training(monkeypatch):
    from tensortap.frameworks.torch import attention

    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(attention, "sample_queries", broken)
    before = tap.receipt().dropped
    train(Model(), analyses=["attention"])
    assert tap.receipt().dropped != before


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_scripts_and_traces_that_are_made_meanwhile():
    def weights(x):
        return torch.softmax(x, dim=-1) + functional.softmax(x, dim=-1) + x.softmax(-1)

    def attend(x):
        return functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 3, 4)
    with tap.track(Model(), analyses=["attention"]):
        for function in (weights, attend):
            for made in (torch.fx.symbolic_trace(function), torch.jit.script(function)):
                assert torch.equal(made(x), function(x))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fused", "method"])
def test_attention_on_a_device(way, monkeypatch):
    """The device is replaced: tensors of the host are read as if they were on one."""
    here = train(Model(way=way), analyses=["attention"])
    monkeypatch.setattr(attention, "is_here", lambda tensor: False)
    monkeypatch.setattr(host, "is_here", lambda tensor: False)
    away = train(Model(way=way), analyses=["attention"])
    assert not away.unseen
    found, expected = ([(r.name, r.value) for r in t.records if r.kind == "Health"]
                       for t in (away, here))  # fmt: skip
    assert found == expected != []
    monkeypatch.setattr(host, "why_not", lambda tensor: "captured")
    unread = train(Model(way=way), analyses=["attention"])
    assert "the host cannot read" in unread.unseen["attention"]
    assert not [r for r in unread.records if r.kind == "Health"]


class Block(nn.Module):
    """A block of a GPT, whose attention is computed between two of its modules."""

    def __init__(self, **options):
        super().__init__()
        self.norm, self.attend, self.out = nn.LayerNorm(16), Attend(**options), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.out(self.attend(self.norm(x)).transpose(1, 2).flatten(2))


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


def compiled(net, way, backend="aot_eager"):
    torch._dynamo.reset()
    if way == "blocks":
        for block in net.blocks:
            block.compile(backend=backend, fullgraph=True)
        return net
    if way == "in place":
        net.compile(backend=backend, fullgraph=True)
        return net
    return torch.compile(net, backend=backend, fullgraph=True, dynamic=way == "dynamic" or None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch, for blocks
@pytest.mark.parametrize("way", ["whole", "in place", "blocks", "dynamic"])
def test_attention_in_compiled_graphs(way):
    options = {"is_causal": True}
    if way == "dynamic":  # one layer, because it takes longest
        options = {"layers": 1, "scale": 0.3, "attn_mask": BIAS.float()}
    selected = {"every": 2, "analyses": ["norms", "updates", "activations", "attention"]}
    expected = health(train(GPT(**options), 5, **selected))
    nets = GPT(**options), GPT(**options)
    train(compiled(nets[0], way), 5, activations=False, gradients=False)
    call = compiled(nets[1], way)
    counters = torch._dynamo.utils.counters
    counters.clear()
    tracker = train(call, 5, **selected)
    assert counters["stats"]["unique_graphs"] == 1  # one for all steps, and for both blocks
    assert not counters["graph_break"]
    assert not tracker.unseen
    found = health(tracker)
    assert found.keys() == expected.keys()
    assert f"blocks.{len(nets[0].blocks) - 1}.attend.max_logit_3" in {name for name, _ in found}
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=CLOSE, abs=CLOSE, nan_ok=True), key
    pairs = zip(*(net.parameters() for net in nets), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_attention_in_graphs_of_inductor():
    selected = {"analyses": ["attention"], "activations": False, "gradients": False}
    expected = health(train(GPT(is_causal=True), 2, **selected))
    found = health(train(compiled(GPT(is_causal=True), "whole", "inductor"), 2, **selected))
    assert "blocks.1.attend.entropy_3" in {name for name, _ in found}
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "net", [GPT(layers=1, way="method"), Multihead(True), Multihead(False)],
    ids=["softmax", "weights of nn.MultiheadAttention", "nn.MultiheadAttention"],
)  # fmt: skip
def test_other_attention_in_compiled_graphs_is_reported(net):
    tracker = train(compiled(net, "in place"), analyses=["attention"])
    assert "modules call scaled_dot_product_attention" in tracker.unseen["attention"]
    assert not health(tracker)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_hugging_face(implementation):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        intermediate_size=32, vocab_size=50, attn_implementation=implementation,
    )  # fmt: skip
    net = LlamaForCausalLM(config)
    ids = torch.arange(14).reshape(2, 7)
    want = net(ids, output_attentions=implementation == "eager").attentions
    with tap.track(net, analyses=["attention"]) as tracker:
        net(ids, labels=ids).loss.backward()
        tracker.step()
    row = numbers(tracker, "model.layers.1.self_attn[0]").iloc[0]
    assert row["max_logit_3"] > -math.inf
    if want is not None:
        p = want[1].detach().double()
        entropy = -torch.where(p > 0, p * p.log(), 0.0).sum(-1).mean((0, 2))
        found = [row[f"entropy_{head}"] for head in range(4)]
        np.testing.assert_allclose(found, entropy.numpy(), rtol=1e-5)
