"""Runs are matched token by token, whatever their layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tensortap as tap
from tests.align.engines import llama, record
from tests.commands import type_in

pytestmark = pytest.mark.slow  # they import transformers
BFLOAT16 = torch.bfloat16

# the layouts of trainer and engine, the dtype, whether modules are tracked
CLEAN = [
    ("right", "left", torch.float32, False),
    ("right", "packed", torch.float32, True),
    ("right", "decoded", torch.float32, True),
    ("packed", "chunked", torch.float32, False),
    ("decoded", "chunked", torch.float32, False),
    ("left", "left", torch.float32, False),
    ("right", "left", BFLOAT16, True),
    ("right", "packed", BFLOAT16, True),
    ("packed", "right", BFLOAT16, True),
]


@pytest.mark.parametrize(("a", "b", "dtype", "track"), CLEAN)
def test_clean_pairs_agree(tmp_path, a, b, dtype, track):
    model, track = llama(dtype), "input_ids" if track else None
    first = record(tmp_path / "a", a, model=model, track=track)
    second = record(tmp_path / "b", b, model=model, track=track)
    found = tap.align(first, second)
    assert found, found
    if a == b:
        assert found.verdict == "agree"
    elif dtype == torch.float32:
        assert found.verdict == "rounding only"
    assert found.matched >= 80
    assert found.names[-1].rows == 80
    assert not found.reasons


def test_noise_sets_the_tolerance(tmp_path):
    """Without hidden states nothing says that the model is one of bfloat16, except a rerun."""
    model = llama(BFLOAT16)
    first, second, again = (
        record(tmp_path / layout, layout, model=model) for layout in ("right", "decoded", "chunked")
    )
    assert not tap.align(first, second)
    assert tap.align(first, second, noise=again).verdict == "rounding only"


def test_the_first_layer_that_differs(tmp_path):
    first = record(tmp_path / "a", "right", track="input_ids")
    weight = llama().model.layers[1].self_attn.o_proj.weight
    with torch.no_grad():
        before = weight.clone()
        weight *= 1.01
    second = record(tmp_path / "b", "decoded", track="input_ids")
    with torch.no_grad():
        weight.copy_(before)
    found = tap.align(first, second, decoder=lambda ids: " ".join(map(str, ids)))
    assert found.first.name == "model.layers.1.self_attn.o_proj"
    assert found.first.mean == pytest.approx(0.01, rel=0.1)
    assert found.worst[0].text.split()[-1] == str(found.worst[0].token)
    assert found.logprobs.k3 > 0
    assert found.logprobs.largest == max(abs(each.b - each.a) for each in found.worst)


def test_estimates_of_the_divergence(tmp_path):
    ids = np.arange(1, 10_001)[None]
    a = np.log(np.full((1, 10_000), 0.5))
    b = a + np.where(ids % 2 == 0, 0.3, -0.1)
    for name, values in (("a", a), ("b", b)):
        tap.init(tmp_path / name)
        tap.catch(values, "logprobs", tokens=ids)
        tap.finish()
    found = tap.align(*(next((tmp_path / name).iterdir()) for name in "ab")).logprobs
    ratio = np.exp(a - b)[0, 1:]
    assert found.k1 == pytest.approx(float((b - a)[0, 1:].mean()))
    assert found.k3 == pytest.approx(float((ratio - 1 - np.log(ratio)).mean()))
    assert found.outside == pytest.approx(((ratio < 0.8) | (ratio > 1.2)).mean())
    assert found.quantiles["0.5"] == pytest.approx(0.3)


def test_other_experts(tmp_path):
    ids = np.arange(100)[None]
    experts = np.stack([ids[0] % 8, (ids[0] + 1) % 8], 1)[None]
    other = experts[..., ::-1].copy()  # the same ones in another order
    other[0, :10, 0] += 8
    for name, values in (("a", experts), ("b", other)):
        tap.init(tmp_path / name)
        tap.catch(values, "router", tokens=ids)
        tap.finish()
    found = tap.align(*(next((tmp_path / name).iterdir()) for name in "ab"))
    assert (found.verdict, found.first.kind, found.first.share) == ("differ", "experts", 0.1)


@pytest.mark.parametrize(
    ("first", "apart", "code", "words"),
    [
        (1, 0.0, 0, "agree: 39 contexts are in both"), (1, 3e-7, 0, "rounding only: 39 contexts"),
        (1, 0.5, 1, "differ: 39 contexts"), (500, 0.0, 2, "no tokens with equal contexts"),
    ],
)  # fmt: skip
def test_the_command(tmp_path, first, apart, code, words):
    runs = []
    for begin, value in ((1, np.log(0.5)), (first, np.log(0.5) + apart)):
        runs.append(tap.init(tmp_path))
        tap.catch(np.full(40, value, np.float32), "logprobs", tokens=np.arange(begin, begin + 40))
        tap.finish()
    report = tmp_path / "report.html"
    found, out, err = type_in("align", *runs, "--html", report)
    assert (found, words in out + err) == (code, True), (found, out, err)
    assert report.is_file() == (code < 2)
    if code < 2:
        assert words.split(":")[0] in report.read_text()
        assert tap.align(*runs).figure().data[0].z.shape == (1, 39)
