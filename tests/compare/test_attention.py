"""Two ways to compute attention in a real model: the report names attention, not what follows."""

from __future__ import annotations

import pytest

import tensortap as tap

pytestmark = pytest.mark.slow


def tiny(implementation):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation=implementation,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def train(folder, implementation):
    import torch

    model = tiny(implementation)
    path = tap.init(folder)
    batch = torch.randint(0, 64, (2, 15), generator=torch.Generator().manual_seed(1))
    with tap.track(model, tensors=True) as tracker:
        for _ in range(2):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            tracker.step()
    tap.finish()
    return path


def test_eager_and_sdpa_attention_first_differ_in_attention(tmp_path):
    eager, sdpa = (train(tmp_path, each) for each in ("eager", "sdpa"))
    report = tap.compare(eager, sdpa)
    bitwise = report.first_bitwise
    assert bitwise.key.name == "model.layers.0.self_attn.o_proj"
    assert (bitwise.key.kind, bitwise.key.step) == ("Activation", 0)
    assert "self_attn" in str(report)
    # only eager attention returns its weights
    assert tap.compare(eager, sdpa, atol=1e-4, allow_missing=True)


def test_bisect_tells_rotary_embedding_attention_and_optimizer_apart(tmp_path):
    import torch

    def program(model, **options):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        batch = torch.randint(0, 64, (2, 15), generator=torch.Generator().manual_seed(1))

        def step():
            optimizer.zero_grad()
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()

        return optimizer, step

    model = tiny("eager")
    optimizer, step = program(model)
    options = {"tensors": True, "kind": "all", "to": tmp_path}
    with tap.track(model, optimizer=optimizer, **options) as tracker:
        step()
        tracker.step()
    other = tiny("sdpa")  # another kernel is no fault
    assert tap.bisect(program(other)[1], other, tracker.path, atol=1e-6)
    model = tiny("eager")
    model.model.rotary_emb.inv_freq *= 1.01
    model.model.layers[0].self_attn.scaling *= 1.1
    # the newer name, if this release of transformers has it
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable()
    _, step = program(model, betas=(0.8, 0.999))
    report = tap.bisect(step, model, tracker.path)
    wrong = ("model.rotary_emb", "model.layers.0.self_attn", "(optimizer)")
    assert report.modules == wrong, str(report)
    assert "its state differs" in report.faults[2].what
