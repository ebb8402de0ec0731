"""Digests of a trainer's weights against those of engines that name and fuse them differently."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tensortap as tap
from tensortap.core.errors import TensortapError
from tests.commands import type_in

CONFIG = LlamaConfig(
    vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
FUSED = {
    "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
}


@pytest.fixture(scope="module")
def trainer():
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)  # norms are not ones
    return model


class Engine(nn.Module):
    """Weights as engines hold them: fused, tied, with other prefixes, perhaps rounded."""

    def __init__(self, trainer, dtype=torch.bfloat16, names=FUSED, vocabulary=48):
        super().__init__()
        weights = {k.removeprefix("model."): v for k, v in trainer.state_dict().items()}
        del weights["lm_head.weight"]
        for layer in range(CONFIG.num_hidden_layers):
            for fused, parts in names.items():
                held = [weights.pop(f"layers.{layer}.{part}.weight") for part in parts]
                weights[f"layers.{layer}.{fused}.weight"] = torch.cat(held)
        extra = vocabulary - 48
        embedding = weights["embed_tokens.weight"]
        weights["embed_tokens.weight"] = torch.cat([embedding, torch.zeros(extra, 32)])
        for name, value in weights.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(value.to(dtype).clone()))

    def parameter(self, name):
        return self.get_parameter(name)


def states(report):
    return {each.state for each in report.states}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_tied_and_rounded_weights_agree(trainer, dtype):
    report = tap.compare(tap.digest(trainer), tap.digest(Engine(trainer, dtype)))
    assert report, report
    assert len(report.states) == 3 + 3 * 6
    assert states(report) == {"tied", "equal" if dtype == torch.float32 else "cast"}
    fused = {each.others[0]: each.names for each in report.states if len(each.names) > 1}
    assert fused["layers.1.mlp.gate_up_proj.weight"] == (
        "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight",
    )  # fmt: skip
    assert tap.compare(tap.digest(Engine(trainer, dtype)), tap.digest(trainer))


def test_other_names_are_found_by_content(trainer):
    names = {"attention.mix": FUSED["self_attn.qkv_proj"], "w13": FUSED["mlp.gate_up_proj"]}
    engine = Engine(trainer, names=names)
    with torch.no_grad():
        engine.parameter("layers.2.w13.weight")[50, 3] *= 2
    layout = {"w13": FUSED["mlp.gate_up_proj"]}
    (wrong,) = tap.compare(tap.digest(trainer), tap.digest(engine), layout=layout).wrong
    assert wrong.others == ("layers.2.w13.weight",)
    assert wrong.names[1] == "model.layers.2.mlp.up_proj.weight"
    assert wrong.state == "differ"


def test_a_padded_vocabulary_agrees(trainer):
    report = tap.compare(tap.digest(trainer), tap.digest(Engine(trainer, torch.float32, {}, 64)))
    assert report
    assert any(each.note == "padded with zeros" for each in report.states)
    engine = Engine(trainer, torch.float32, {}, 64)
    with torch.no_grad():
        engine.parameter("embed_tokens.weight")[60] = 1
    (wrong,) = tap.compare(tap.digest(trainer), tap.digest(engine)).wrong
    assert wrong.note == "shapes [48, 32] and [64, 32]"


def test_what_did_not_arrive_is_named(trainer):
    engine = Engine(trainer)
    old = tap.digest(trainer)
    parameter = trainer.model.layers[1].self_attn.v_proj.weight
    norm = trainer.model.norm.weight
    down = trainer.model.layers[0].mlp.down_proj.weight
    before = [each.detach().clone() for each in (parameter, norm, down)]
    try:
        with torch.no_grad():
            for each in (parameter, norm, down):
                each.mul_(1.5)
            engine.parameter("layers.0.mlp.down_proj.weight").copy_(down).neg_()
            del engine.layers._modules["0"].input_layernorm
        new = tap.digest(trainer, history=old)
    finally:
        with torch.no_grad():
            for each, value in zip((parameter, norm, down), before, strict=True):
                each.copy_(value)
    report = tap.compare(new, tap.digest(engine))
    assert {str(each) for each in report.wrong} == {
        "model.norm.weight → norm.weight: the second has that of an earlier version",
        " + ".join(f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv")
        + " → layers.1.self_attn.qkv_proj.weight: "
        + "the second has model.layers.1.self_attn.v_proj.weight of an earlier version",
        "model.layers.0.mlp.down_proj.weight → layers.0.mlp.down_proj.weight: differ",
        "model.layers.0.input_layernorm.weight: the second lacks it",
    }
    assert "1 differ, 2 are those of an earlier version, 1 are missing" in report.line


def test_names_and_layout_of_the_user():
    rng = np.random.default_rng(0)
    parts = {f"h.{i}.{n}.w": rng.standard_normal((4, 3)) for i in range(2) for n in "qkv"}
    fused = {
        f"block_{i}/mix": np.concatenate([parts[f"h.{i}.{n}.w"] for n in "kqv"]) for i in (0, 1)
    }
    fused["block_1/mix"][0] += 1
    names = [r"h\.(\d+)\.(\w)\.w=block_\1/\2"]
    report = tap.compare(
        tap.digest(parts), tap.digest(fused), names=names,
        layout={f"block_{i}/mix": [f"block_{i}/{n}" for n in "kqv"] for i in (0, 1)},
    )  # fmt: skip
    assert [(each.names, each.state) for each in report.states] == [
        (("h.0.k.w", "h.0.q.w", "h.0.v.w"), "equal"), (("h.1.k.w", "h.1.q.w", "h.1.v.w"), "differ"),
    ]  # fmt: skip


def test_transposed_matrices():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((5, 7)).astype(np.float32)
    plain, turned = tap.digest({"w": w}), {"w": w.T.copy()}
    assert not tap.compare(plain, tap.digest(turned))
    assert "transposed=True" in str(tap.compare(plain, tap.digest(turned)).wrong[0])
    assert tap.compare(plain, tap.digest(turned, transposed=True)).states[0].note == "transposed"
    half = tap.digest({"w": w.T.astype(np.float16)})
    assert tap.compare(tap.digest({"w": w}, transposed=True), half).states[0].state == "cast"
    turned["w"][0, 1] += 1
    assert tap.compare(plain, tap.digest(turned, transposed=True)).wrong[0].state == "differ"


def test_stacked_experts_agree_with_single_ones():
    rng = np.random.default_rng(0)
    experts = {
        f"experts.{i}.{n}": rng.standard_normal((6, 16)) for i in range(4) for n in ("w1", "w3")
    }
    stack = np.stack(
        [np.concatenate([experts[f"experts.{i}.{n}"] for n in ("w1", "w3")]) for i in range(4)]
    )
    report = tap.compare(tap.digest(experts), tap.digest({"experts.w13": stack}))
    assert report
    assert len(report.states[0].names) == 8


def test_equal_tensors_without_equal_names_are_not_called_tied():
    one = {"norm.weight": np.ones(4), "bias": np.zeros((2, 2)), "w": np.eye(2)}
    other = {"norm.weight": np.ones(4), "w": np.eye(2)}
    assert [each.state for each in tap.compare(tap.digest(one), tap.digest(other)).wrong] == [
        "missing"
    ]


def test_dtypes_without_a_common_cast():
    x = torch.randn(3, 4)
    digests = [tap.digest({"w": x.to(dtype)}) for dtype in (torch.bfloat16, torch.float16)]
    (wrong,) = tap.compare(*digests).wrong
    assert wrong.note == "no cast leads from bfloat16 to float16"


def test_files(tmp_path, trainer):
    digest = tap.digest(trainer)
    path = digest.save(tmp_path / "trainer.digest.json")
    assert path.stat().st_size < 10_000
    assert tap.compare(path, tap.digest(Engine(trainer)))
    assert tap.compare(str(path), digest)
    assert tap.rooms.align.load_digest(path) == digest
    other = tap.digest(Engine(trainer, names={})).save(tmp_path / "engine.digest.json")
    code, out, _ = type_in("compare", path, other)
    assert (code, out.split(" of ")[0]) == (0, "<30")
    tap.digest({"w": np.ones(2)}).save(other)
    code, out, _ = type_in("compare", path, other, "--json")
    assert (code, json.loads(out)["agree"]) == (1, False)
    for text, message in (("[]", "is not a digest"), ('{"format": 9', "is not"), ("", "is not")):
        path.write_text(text)
        with pytest.raises(TensortapError, match=message):
            tap.compare(path, digest)
    with pytest.raises(TensortapError, match="can only be compared with a digest"):
        tap.compare(digest, 3)
    with pytest.raises(TensortapError, match="layout must map"):
        tap.compare(digest, digest, layout={"a": "b"})
