"""Bugs are told from rounding, by a run of the reference with perturbed inputs."""

from __future__ import annotations

import contextlib
import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensortap as tap
from tensortap.core.errors import TensortapError
from tests.commands import type_in


class SplitLinear(nn.Linear):
    """Adds up its products in another order."""

    def forward(self, x):
        k = self.in_features // 3
        w = self.weight
        return (x[..., k:] @ w[:, k:].T + x[..., :k] @ w[:, :k].T) + self.bias


class Block(nn.Module):
    def __init__(self, linear, scale=1.0, eps=1e-5, act="none"):
        super().__init__()
        self.n1, self.qkv, self.o = nn.LayerNorm(24, eps=eps), linear(24, 72), linear(24, 24)
        self.n2, self.up, self.down = nn.LayerNorm(24), linear(24, 96), linear(96, 24)
        self.act, self.scale = nn.GELU(approximate=act), scale

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(batch, length, 3, 2, 12).permute(2, 0, 3, 1, 4)
        mask = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)
        scores = q @ k.mT * (self.scale / math.sqrt(12)) + mask
        x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, 24))
        return x + self.down(self.act(self.up(self.n2(x))))


class Net(nn.Module):
    def __init__(self, linear=nn.Linear, **bug):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 24)
        self.blocks = nn.ModuleList(Block(linear, **(bug if i == 1 else {})) for i in range(3))
        self.head = linear(24, 50)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.arange(8 * 12).reshape(8, 12) * 7 % 50


def run(folder, model, noisy=False, autocast=False, parts=1):
    path = tap.init(folder)
    with (
        tap.perturbed(model) if noisy else contextlib.nullcontext(),
        tap.track(model, tensors=True) as tracker,
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        for ids in IDS.chunk(parts):
            loss = F.cross_entropy(model(ids).float().flatten(0, 1), ids.roll(-1, 1).flatten())
            (loss / parts).backward()
        tracker.step()
    tap.finish()
    return path


def negated_row(model):
    with torch.no_grad():
        model.blocks[1].down.weight[3] *= -1
    return model


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_bugs_are_told_from_rounding(tmp_path, precision):
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    autocast = precision == "autocast"

    def made(*args, **bug):
        return Net(*args, **bug).to(dtype)

    reference = run(tmp_path, made(), autocast=autocast)
    run(tmp_path, made(), noisy=True, autocast=autocast)
    same = tap.compare(run(tmp_path, made(), autocast=autocast), reference, tolerance="auto")
    assert (same.verdict, same.ratios) == ("agree", ())
    order = run(tmp_path, made(SplitLinear), autocast=autocast)
    found = tap.compare(order, reference, tolerance="auto")
    assert found.verdict == "rounding", found
    assert found
    assert 0 < found.worst.ratio < 10
    bugs = {"blocks.1.o": {"scale": 2.0}}
    if precision == "float32":  # the others round more than that
        bugs["blocks.1.o "] = {"scale": 1.01}
        bugs["blocks.1.n1"] = {"eps": 1e-6}
        bugs["blocks.1.act"] = {"act": "tanh"}
    for name, bug in bugs.items():
        found = tap.compare(
            run(tmp_path, made(**bug), autocast=autocast), reference, tolerance="auto"
        )
        assert found.verdict == "bug", (bug, found)
        assert found.first.key.name == name.strip(), (bug, found)
        assert not found
    found = tap.compare(
        run(tmp_path, negated_row(made()), autocast=autocast), reference, tolerance="auto"
    )
    assert (found.verdict, found.first.key.name) == ("bug", "blocks.1.down.weight")


@pytest.mark.slow
def test_another_batch_layout_is_rounding(tmp_path, forks):
    def outputs(model, noisy=False, parts=1):
        path = tap.init(tmp_path)
        with tap.perturbed(model) if noisy else contextlib.nullcontext():
            found = torch.cat([model(ids) for ids in IDS.chunk(parts)]).detach()
        tap.catch(found, "logits")
        tap.finish()
        return path

    reference, noise = outputs(Net()), outputs(Net(), noisy=True)
    split = outputs(Net(), parts=8)
    found = tap.compare(split, reference, tolerance="auto", noise=noise)
    assert found.verdict in ("rounding", "agree"), found
    # the noise may be another layout, too, and is asked for where there is none
    wrong = outputs(Net(scale=1.01), parts=8)
    assert tap.compare(wrong, reference, tolerance="auto", noise=noise).verdict == "bug"
    code, out, _ = type_in("compare", split, reference, "--tolerance", "auto")
    assert code == 0
    assert "rounding" in out or "agree" in out
    code, out, _ = type_in("compare", wrong, reference, "--tolerance", "auto", "--json")
    assert code == 1
    assert json.loads(out)["verdict"] == "bug"


def test_perturbed_moves_each_number_by_one_place_and_draws_no_global_numbers(tmp_path, caplog):
    class Inputs(nn.Module):
        def forward(self, x, ids, *, y):
            self.seen = x, ids, y
            return x + y

    model, x = Inputs(), torch.tensor([1.0, -3.5, 0.0, torch.inf, 1e30], requires_grad=True)
    ids, y = torch.arange(3), torch.ones(5, dtype=torch.bfloat16)
    state = torch.get_rng_state()
    with tap.perturbed(model) as found:
        model(x, ids, y=y).sum().backward()
    seen = model.seen
    assert torch.equal(torch.get_rng_state(), state)
    assert found.tensors == 2
    assert seen[1] is ids
    ulps = (seen[0].detach().view(torch.int32) - x.detach().view(torch.int32)).abs()
    assert ulps.tolist() == [1, 1, 0, 0, 1]
    assert (seen[2].view(torch.int16) - y.view(torch.int16)).abs().tolist() == [1] * 5
    assert x.grad.tolist() == [1] * 5
    with tap.perturbed(model, seed=0):
        model(x, ids, y=y)
    assert torch.equal(model.seen[0], seen[0])
    model(x, ids, y=y)
    assert torch.equal(model.seen[0], x)  # hooks are gone
    with tap.perturbed(nn.Linear(2, 2)):
        pass
    assert "nothing was perturbed" in caplog.text
    path = tap.init(tmp_path / "removed")
    with tap.perturbed(model):
        model(x, ids, y=y)
        shutil.rmtree(path)
    assert "is not marked as perturbed" in caplog.text


def test_wrong_arguments(tmp_path):
    path = tap.init(tmp_path)
    tap.catch(1.0, "x")
    tap.finish()
    with pytest.raises(TensortapError, match="no perturbed run is beside"):
        tap.compare(path, path, tolerance="auto")
    with pytest.raises(ValueError, match="tolerance must be 'auto', got 'loose'"):
        tap.compare(path, path, tolerance="loose")
    with pytest.raises(TensortapError, match="rtol: tolerance='auto' finds"):
        tap.compare(path, path, tolerance="auto", noise=path, rtol=1e-3)
    with pytest.raises(TypeError, match="tolerance: for runs only"):
        tap.compare(1, 2, tolerance="auto")
    with pytest.raises(TensortapError, match="model must be a module of torch, got int"):
        tap.perturbed(3).__enter__()
