"""Planted mismatches are named; clean pairs are not blamed."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import tensortap as tap
from tests.align.engines import Engine, gpt2, llama, logprobs, record

pytestmark = pytest.mark.slow  # they import transformers


@contextlib.contextmanager
def changed(model, **attributes):
    """Change attributes of the attention of a model."""
    modules = [each for each in model.modules() if hasattr(each, next(iter(attributes)))]
    before = [{name: getattr(each, name) for name in attributes} for each in modules]
    for each in modules:
        for name, change in attributes.items():
            setattr(each, name, change(getattr(each, name)))
    yield
    for each, old in zip(modules, before, strict=True):
        for name, value in old.items():
            setattr(each, name, value)


@contextlib.contextmanager
def coarse(name, dtype):
    """Compute one module of the model in another dtype."""
    module = llama().get_submodule(name)
    forward, kept = module.forward, {k: v.clone() for k, v in module.state_dict().items()}

    def run(x, *args, **options):
        options = {
            k: tuple(t.to(dtype) for t in v) if k == "position_embeddings" else v
            for k, v in options.items()
        }
        mask = options.get("attention_mask")
        if torch.is_tensor(mask) and mask.is_floating_point():
            options["attention_mask"] = mask.clamp(min=-3e4).to(dtype)
        return forward(x.to(dtype), *args, **options).float()

    module.to(dtype).forward = run
    yield
    del module.forward
    module.float().load_state_dict(kept)


@contextlib.contextmanager
def later_weights(version):
    """Train the model a little."""
    head = llama().lm_head.weight
    before = head.detach().clone()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        head += 0.1 * version * head.std() * torch.randn(head.shape, generator=generator)
    yield
    with torch.no_grad():
        head.copy_(before)


def kept(most=None, mass=None):
    """Log-probabilities renormalized over the most likely tokens."""

    def score(logits, ids):
        order, index = logits.sort(-1, descending=True)
        share = order.softmax(-1)
        drop = share.cumsum(-1) - share >= mass if mass else torch.arange(share.shape[-1]) >= most
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, drop.expand_as(share))
        drop.scatter_(-1, ids[..., None], False)  # of prompts, which were not drawn
        return logprobs(logits.masked_fill(drop, float("-inf")), ids)

    return score


def at(temperature):
    return lambda logits, ids: logprobs(logits, ids, temperature)


def in_bfloat16(logits, ids):
    return logprobs(logits, ids, dtype=torch.bfloat16).float()


def of_bfloat16(logits, ids):
    return logprobs(logits.bfloat16().float(), ids)


SHIFTED = "log-probabilities shifted by one"
TEMPERATURE, TWICE = "temperature not applied", "temperature applied twice"
SOFTMAX, LAYER = "log-softmax in another dtype", "one layer in another precision"
SCALE, LATE, ROPE = "another attention scale", "cache one token late", "RoPE offset"
WEIGHTS, PADDING = "weights of an earlier version", "padding is attended to"

TRACK = {"track": "input_ids"}
# the reason, the layout of the engine, the trainer, the engine, what is changed meanwhile
PLANTED = [
    (TEMPERATURE, "right", {"score": at(0.6)}, {}, None),
    (TEMPERATURE, "packed", {}, {"score": at(1.4)}, None),
    (TWICE, "decoded", {"score": at(0.7)}, {"score": at(0.49)}, None),
    ("top-k renormalization", "chunked", {}, {"score": kept(most=12)}, None),
    ("top-p renormalization", "decoded", {}, {"score": kept(mass=0.8)}, None),
    (SOFTMAX, "left", {}, {"score": in_bfloat16}, None),
    (SOFTMAX, "packed", {}, {"score": of_bfloat16}, None),
    (SHIFTED, "right", {}, {"shift": 1}, None),
    (SHIFTED, "packed", {}, {"shift": -1}, None),
    ("positions shifted", "left", {"model": gpt2}, {"model": gpt2, "padded_positions": True}, None),
    (ROPE, "decoded", {}, {"moved": 1}, None),
    (ROPE, "chunked", {}, {"moved": -2}, None),
    (LAYER, "packed", TRACK, TRACK, lambda: coarse("model.layers.1.mlp", torch.bfloat16)),
    (LAYER, "right", {}, {}, lambda: coarse("lm_head", torch.float16)),
    (PADDING, "left", {}, {"masked": False}, None),
    ("packed sequences attend to each other", "packed", {}, {"alone": False}, None),
    (LATE, "decoded", {}, {"late": 0}, None),
    (LATE, "chunked", {}, {"late": 1}, None),
    (SCALE, "left", {}, {}, lambda: changed(llama(), scaling=lambda s: 2 * s)),
    (SCALE, "decoded", {}, {}, lambda: changed(llama(), scaling=lambda s: 1.0)),
    (SCALE, "packed", {}, {}, lambda: changed(llama(), scaling=lambda s: s * 0.5**0.5)),
    (LAYER, "decoded", {}, {}, lambda: coarse("model.norm", torch.bfloat16)),
    (SOFTMAX, "chunked", {"score": in_bfloat16}, {}, None),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "layout", "a", "b", "change"), PLANTED)
def test_planted_mismatches_are_named(tmp_path, reason, layout, a, b, change):
    a, b = ({k: v() if k == "model" else v for k, v in each.items()} for each in (a, b))
    first = record(tmp_path / "a", "right", **a)
    with change() if change else contextlib.nullcontext():
        second = record(tmp_path / "b", layout, **b)
    found = tap.align(first, second, model=a.get("model", llama()))
    assert not found
    assert found.reason == reason, found
    assert found.reasons[0].after < 0.5 * found.reasons[0].before or reason == "positions shifted"


class Version(Engine):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def run(self, layout):
        with later_weights(self.number):
            super().run(layout)


@pytest.mark.parametrize(
    ("layout", "versions", "words"),
    [("left", [0, 0, 1], "1 steps before"), ("decoded", [0, 0, 0], "with A at step 0")],
)
def test_earlier_weights_are_named(tmp_path, layout, versions, words):
    first = record(tmp_path / "a", "right", *map(Version, [0, 1, 2]))
    second = record(tmp_path / "b", layout, *map(Version, versions))
    found = tap.align(first, second)
    assert found.reason == WEIGHTS, found
    assert words in found.reasons[0].evidence


def test_digests_of_an_earlier_version_are_named(tmp_path):
    """Both programs record digests of their weights; those of B are one version late."""
    runs = []
    for side, late in (("a", 0), ("b", 1)):
        runs.append(tap.init(tmp_path / side))
        for version in range(3):
            weights = {"w": np.arange(4.0) + max(version - late, 0)}
            tap.digest(weights).record("policy", version=version)
        tap.catch(np.arange(8.0) + late, "values", tokens=np.arange(8))
        tap.finish()
    found = tap.align(*runs)
    assert found.reason == WEIGHTS
    evidence = "by digests B has version 1 of 'policy'; A has 2"
    assert [each.evidence for each in found.reasons] == [evidence]
    assert not tap.align(runs[0], runs[0]).reasons
