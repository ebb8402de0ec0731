"""A transformers model with ``tp_plan="auto"`` on two ranks, compared with one process."""

import pytest

import tensortap as tap

pytestmark = pytest.mark.slow

_MODEL = """
import torch, tensortap as tap
from transformers import LlamaConfig, LlamaForCausalLM

def train(net, folder):
    net.train()
    tap.init(folder)
    opt = torch.optim.SGD(net.parameters(), lr=0.01, foreach=False)
    x = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    with tap.track(net, optimizer=opt, tensors=True) as tracker:
        net(input_ids=x, labels=x).loss.backward()
        opt.step()
        tracker.step()
    assert tracker.unseen == {}, tracker.unseen
"""

_PARALLEL = (
    _MODEL
    + """
for name in ("right", "wrong"):
    net = LlamaForCausalLM.from_pretrained(os.environ["SAVED"], tp_plan="auto")
    if name == "wrong" and rank == 1:
        with torch.no_grad():
            net.model.layers[1].self_attn.o_proj.weight.to_local().add_(0.5)
    train(net, os.environ["RUNS"] + name)
    assert tap.flush(300)
    dist.barrier()
    tap.finish()
result = {}
"""
)


def test_tensor_parallel_plan_agrees_and_a_wrong_weight_is_named(gloo, tmp_path):
    space = {}
    exec(_MODEL, space)
    saved = tmp_path / "model"
    config = space["LlamaConfig"](
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    space["LlamaForCausalLM"](config).save_pretrained(saved)
    space["train"](space["LlamaForCausalLM"].from_pretrained(saved), tmp_path / "one")
    tap.finish()
    gloo(_PARALLEL, RUNS=f"{tmp_path}/", SAVED=str(saved))
    right, wrong, one = (next((tmp_path / name).iterdir()) for name in ("right", "wrong", "one"))
    report = tap.compare(right, one, rtol=1e-4, atol=1e-6)
    assert report, str(report)
    assert not report.unplaced
    assert not report.missing
    report = tap.compare(wrong, one, rtol=1e-4, atol=1e-6)
    assert report.first.key.name == "model.layers.1.self_attn.o_proj.weight"  # the initial one
    assert report.ranks == (1,)
    assert "o_proj.weight (Weight) differs before any output does" in report.culprit
