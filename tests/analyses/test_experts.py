"""Routers of mixtures of experts: found by what they return, whatever their class is."""

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.rooms.analyses.experts import routing

CLOSE = 1e-12


def routed(tracker):
    """Return the numbers of each router, by name."""
    frame = tracker.logframe()
    frame = frame[frame["metadata"]["tensor_type"] == "Activation"]
    names = frame["metadata"]["name"].tolist()
    numbers = frame["scalar_stats"].to_dict("records")
    pairs = zip(names, numbers, strict=True)
    return {name: row for name, row in pairs if not np.isnan(row.get("router_entropy", np.nan))}


def train(net, *args, **named):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with tap.track(net, optimizer, analyses=["experts"]) as tracker:
        out = net(*args, **named)
        getattr(out, "loss", out).mean().backward()
        optimizer.step()
        tracker.step()
    return tracker


def assert_router(row, logits, tokens):
    """Compare with the formulas, in float64."""
    logits = logits.detach().double().flatten(0, -2)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    assert row["router_entropy"] == pytest.approx(entropy.item(), rel=CLOSE)
    assert row["router_logit_max"] == logits.abs().max().item()
    assert row["router_logit_rms"] == pytest.approx(logits.square().mean().sqrt().item(), rel=CLOSE)
    assert [row[f"tokens_{i}"] for i in range(len(tokens))] == tokens.tolist()
    share = tokens[tokens > 0].double() / tokens.sum()
    load = -(share * share.log()).sum() / np.log(len(tokens))
    assert row["load_entropy"] == pytest.approx(load.item(), rel=CLOSE)
    assert row["busiest_share"] == pytest.approx(share.max().item(), rel=CLOSE)
    assert row["idle_experts"] == (tokens == 0).sum().item()


class Gated(nn.Module):
    """A mixture whose gate is a plain linear layer."""

    def __init__(self, experts=4, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(8, experts)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        self.logits = self.gate(x)
        weights = self.logits.softmax(-1)
        return sum(weights[:, i, None] * each(x) for i, each in enumerate(self.experts))


def test_a_gate_in_a_module_that_knows_its_experts():
    net = Gated(num_experts=4, top_k=2)
    found = routed(train(net, torch.randn(30, 8)))
    assert list(found) == ["gate"]
    tokens = torch.bincount(net.logits.topk(2).indices.flatten(), minlength=4)
    assert_router(found["gate"], net.logits, tokens)
    assert np.isnan(found["gate"].get("dropped_share", np.nan))  # nothing bounds the experts
    assert not routed(train(Gated(), torch.randn(30, 8)))


class Capped(nn.Module):
    """A router whose experts take at most five tokens; it returns which choices are kept."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.num_experts, self.expert_capacity = 3, 5
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        logits = self.linear(x)
        chosen = nn.functional.one_hot(logits.argmax(-1), 3)
        kept = chosen * (chosen.cumsum(0) <= self.expert_capacity)
        self.logits, self.kept = logits, kept
        return kept, logits


class WithCapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Capped()

    def forward(self, x):
        kept, logits = self.router(x)
        return (kept * logits).sum(-1)


def test_tokens_beyond_the_capacity_are_dropped():
    net = WithCapped()
    row = routed(train(net, torch.randn(40, 8)))["router[1]"]
    tokens = net.router.kept.sum(0)
    assert_router(row, net.router.logits, tokens)
    assert row["dropped_share"] == pytest.approx(1 - tokens.sum().item() / 40, rel=CLOSE)
    assert row["dropped_share"] > 0.5


def test_calls_of_a_step_add_up():
    net = WithCapped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    totals, dropped = torch.zeros(3), []
    with tap.track(net, optimizer, analyses=["experts"]) as tracker:
        for _ in range(3):
            net(torch.randn(20, 8)).mean().backward()
            totals += net.router.kept.sum(0)
            dropped.append(1 - net.router.kept.sum().item() / 20)
        optimizer.step()
        tracker.step()
    row = routed(tracker)["router[1]"]
    assert [row[f"tokens_{i}"] for i in range(3)] == totals.tolist()
    assert row["dropped_share"] == pytest.approx(np.mean(dropped), rel=CLOSE)


def test_dropped_choices_as_indices_and_as_a_mask():
    logits = np.random.default_rng(0).standard_normal((50, 6))
    chosen = logits.argmax(axis=1)[:, None]
    mask = np.zeros((50, 6), bool)
    mask[np.arange(50), chosen[:, 0]] = True
    mask[:10] = False
    chosen[:10] = 6  # the number of experts stands for none
    for found in (routing(logits, chosen), routing(logits, mask)):
        assert found.dropped == pytest.approx(0.2, rel=CLOSE)
        assert found.tokens.tolist() == mask.sum(axis=0).tolist()


SMALL = {
    "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 16, "vocab_size": 40, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {
    "Mixtral": dict(**SMALL, num_local_experts=4),
    "SwitchTransformers": {
        "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 2,
        "num_heads": 2, "vocab_size": 40, "num_experts": 4, "expert_capacity": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1, "decoder_start_token_id": 0,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_hugging_face(family):
    import transformers

    torch.manual_seed(0)
    switch = family == "SwitchTransformers"
    head = "ForConditionalGeneration" if switch else "ForCausalLM"
    config = getattr(transformers, f"{family}Config")(**MODELS[family])
    net = getattr(transformers, f"{family}{head}")(config).train()
    returned = {}
    for name, module in net.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(
                lambda module, args, output, name=name: returned.setdefault(name, output)
            )
    ids = torch.randint(1, 40, (2, 9))
    found = routed(train(net, input_ids=ids, labels=ids))
    assert {name.split("[")[0] for name in found} == set(returned)
    for label, row in found.items():
        output = returned[label.split("[")[0]]
        if switch:
            kept, _, logits = output
            tokens = kept.flatten(0, -2).sum(0)
            dropped = 1 - tokens.sum().item() / 18
            assert row["dropped_share"] == pytest.approx(dropped, rel=CLOSE)
        else:
            logits, _, chosen = output
            tokens = torch.bincount(chosen.flatten(), minlength=4)
            assert tokens.sum() == 36
        assert_router(row, logits, tokens)
