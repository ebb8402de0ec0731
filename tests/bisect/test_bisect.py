"""Bisect: every faulty module by itself, however many there are."""

from __future__ import annotations

import collections
import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tap

ROOT = Path(__file__).parents[2]
WIDTH, HEADS, LENGTH = 8, 2, 5


class Attention(nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.fault = fault

    def forward(self, x):
        parts = (HEADS, -1) if self.fault != "heads" else (-1, HEADS)
        q, k, v = (
            each.unflatten(-1, parts).transpose(-2, -3 if self.fault != "heads" else -1)
            for each in self.qkv(x).chunk(3, -1)
        )
        if self.fault == "heads":
            q, k, v = (each.transpose(-2, -3) for each in (q, k, v))
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(2 if self.fault == "mask" else 1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    def __init__(self, faults):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-3 if "eps" in faults else 1e-5)
        self.attn = Attention(next((each for each in ("mask", "heads") if each in faults), ""))
        self.norm2 = nn.LayerNorm(WIDTH)
        activation = nn.ReLU() if "activation" in faults else nn.GELU()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), activation, nn.Linear(16, WIDTH))
        self.scale = 1.0 if "residual" in faults else 0.5

    def forward(self, x):
        x = x + self.scale * self.attn(self.norm1(x))
        return x + self.scale * self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, faults=()):
        super().__init__()
        torch.manual_seed(0)
        first, second = {"eps", "mask"} & set(faults), {"activation", "residual", "heads"}
        self.tokens = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(first), Block(second & set(faults))])
        self.head = nn.Linear(WIDTH, 11)
        self.head.weight = self.tokens.weight
        if "transposed" in faults:
            with torch.no_grad():
                self.blocks[0].attn.out.weight.copy_(self.blocks[0].attn.out.weight.T.clone())

    def forward(self, text):
        x = self.tokens(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


FAULTS = {
    "eps": "blocks.0.norm1",
    "activation": "blocks.1.mlp.1",
    "transposed": "blocks.0.attn.out",
    "residual": "blocks.1",
    "mask": "blocks.0.attn",
    "heads": "blocks.1.attn",
    "optimizer": "(optimizer)",
}


def program(faults=(), net=Net, loss=nn.functional.cross_entropy, clip=None, seed=3):
    """Return a model, its optimizer, and a function that trains one step."""
    model = net(faults)
    eps = 1e-2 if "optimizer" in faults else 1e-8
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)
    data = torch.Generator().manual_seed(seed)

    def step():
        text = torch.randint(11, (3, LENGTH + 1), generator=data)
        opt.zero_grad()
        loss(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()

    return model, opt, step


def record(folder, steps=1, made=None, **options):
    model, opt, step = made or program()
    options = {"tensors": True, "kind": "all", **options}
    with tap.track(model, optimizer=opt, to=folder, **options) as tracker:
        for _ in range(steps):
            step()
            tracker.step()
    return tracker.path


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return record(tmp_path_factory.mktemp("reference"), steps=3)


def bisect(run, faults=(), **options):
    model, _, step = program(faults, **options)
    return tap.bisect(step, model, run)


NAMES = list(FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 3])
def test_exact_set_of_simultaneous_faults(reference, count):
    """Each fault with its neighbors; all 63 sets of up to three give the same."""
    for first in range(len(NAMES)) if count else [0]:
        faults = (NAMES + NAMES)[first : first + count]
        report = bisect(reference, faults)
        assert sorted(report.modules) == sorted(FAULTS[each] for each in faults), str(report)
        assert not any(each.others for each in report.faults)
        assert bool(report) is not bool(faults)
        assert (report.unsure, report.unjudged, report.notes) == ((), {}, ())


def test_report_says_how_each_module_differs(reference):
    report = bisect(reference, ("residual", "activation", "optimizer"))
    found = {each.module: each for each in report.faults}
    assert found["blocks.1"].what == "input [0] of blocks.1.norm2"
    assert found["blocks.1.mlp.1"].what == "output"
    assert found["(optimizer)"].phase == "optimizer"
    assert "its state agrees: look at lr, eps, weight decay" in found["(optimizer)"].what
    assert 0 < found["blocks.1.mlp.1"].comparison.max_abs < 1
    assert report.judged == {
        "inputs": 23, "outputs": 23, "gradients of outputs": 23, "gradients of weights": 26,
        "weights after the step": 26, "tensors of optimizer state": 78,
    }  # fmt: skip
    lines = str(report).splitlines()
    assert lines[0].startswith("3 faulty modules at step 0, by ")
    assert report.to_json()["faults"][0]["module"] == "blocks.1"


def test_everything_is_as_before(reference):
    model, opt, step = program(["eps"])
    step()
    step()
    kept = [p.clone() for p in model.parameters()]
    moments = [opt.state[p]["exp_avg"].clone() for p in model.parameters()]
    random = torch.get_rng_state()
    report = tap.bisect(step, model, reference, step=2)
    assert report.modules == ("blocks.0.norm1",)
    assert all(map(torch.equal, kept, model.parameters()))
    assert all(
        torch.equal(m, opt.state[p]["exp_avg"])
        for m, p in zip(moments, model.parameters(), strict=True)
    )
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model, opt, step = program()
    assert tap.bisect(step, model, reference)
    assert not opt.state
    assert all(p.grad is None for p in model.parameters())


def test_later_step_starts_from_the_recorded_weights_and_state(reference):
    model, _, step = program()
    step()
    step()
    assert tap.bisect(step, model, reference, step=2)
    for faults in (["activation"], ["optimizer"], ["mask", "optimizer"]):
        model, _, step = program(faults)  # whose weights went another way
        step()
        step()
        with torch.no_grad():
            model.head.weight.mul_(1.5)
        report = tap.bisect(step, model, reference, step=2)
        assert set(report.modules) == {FAULTS[each] for each in faults}, str(report)


def test_code_around_the_model(reference):
    smoothed = functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)
    assert bisect(reference, loss=smoothed).modules == ("(loss)",)
    assert bisect(reference, ["eps"], loss=smoothed).modules == ("blocks.0.norm1", "(loss)")
    assert bisect(reference, seed=4).modules == ("(batch)",)
    clipped = bisect(reference, clip=1e-3)
    assert clipped.modules == ("(gradients)",)
    assert "times those recorded" in clipped.faults[0].what


def test_clipping_does_not_spread_a_fault(tmp_path):
    run = record(tmp_path, made=program(clip=1e-3))
    assert bisect(run, clip=1e-3)
    report = bisect(run, ["activation", "transposed"], clip=1e-3)
    assert set(report.modules) == {"blocks.1.mlp.1", "blocks.0.attn.out"}
    assert bisect(run, clip=2e-3).modules == ("(gradients)",)


class Doubled(torch.autograd.Function):
    """The identity, with a wrong gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


class Wrong(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias
        self.normalized_shape, self.eps = inner.normalized_shape, inner.eps

    def forward(self, x):
        return nn.functional.layer_norm(
            Doubled.apply(x), self.normalized_shape, self.weight, self.bias, self.eps
        )


def test_wrong_backward_of_a_module(reference):
    def net(faults):
        model = Net([each for each in faults if each != "backward"])
        model.blocks[1].norm2 = Wrong(model.blocks[1].norm2)
        return model

    report = bisect(reference, ["backward"], net=net)
    assert report.modules == ("blocks.1.norm2",)
    assert report.faults[0].phase == "backward"
    assert report.faults[0].others == ()
    report = bisect(reference, ["backward", "mask", "optimizer"], net=net)
    assert set(report.modules) == {"blocks.1.norm2", "blocks.0.attn", "(optimizer)"}


def test_names_and_tolerance_are_those_of_compare(reference):
    model, _, step = program(["eps", "mask"])
    holder = nn.Module()
    holder.inner = model
    mapping = [r"^inner\.?=", r"^$=Net"]
    report = tap.bisect(step, holder, reference, mapping=mapping)
    assert report.modules == ("inner.blocks.0.norm1", "inner.blocks.0.attn")
    assert tap.bisect(step, model, reference, atol=0.01).modules[:1] != ("blocks.0.norm1",)


def test_reference_without_inputs_names_both_suspects(tmp_path):
    run = record(tmp_path, kind=None)
    report = bisect(run, ["eps", "activation"])
    assert set(report.modules) == {"blocks.0.norm1", "blocks.1.mlp.1"}
    assert not any(each.others for each in report.faults)
    report = bisect(run, ["heads"])
    assert [each.title for each in report.faults] == ["blocks.1.attn.out or blocks.1.attn"]
    assert 'kind="all"' in report.notes[-1]


class Cut(nn.Module):
    """A norm after a `detach`: in the code of the model, or in the module before it."""

    def __init__(self, faults=()):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm = nn.Embedding(11, WIDTH), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2, self.head = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, 11))
        self.faults = faults
        if "inside" in faults:
            self.fc2.forward = lambda x: nn.functional.linear(
                x.detach(), self.fc2.weight, self.fc2.bias
            )
        if "row" in faults:  # of a token that is not in the text
            with torch.no_grad():
                self.tokens.weight[10] += 1

    def forward(self, text):
        x = self.tokens(text.clamp(max=9))
        h = self.fc1(x)
        x = x + self.fc2(self.norm(h.detach() if "branch" in self.faults else h))
        return self.head(x.detach() if "trunk" in self.faults else x)


def undoing(made):
    """Return a program that puts back a weight after each step."""
    model, opt, step = made

    def undone():
        kept = model.fc2.weight.detach().clone()
        step()
        with torch.no_grad():
            model.fc2.weight.copy_(kept)

    return model, opt, undone


def test_detached_gradients_and_stale_weights(tmp_path):
    run = record(tmp_path, made=program(net=Cut))
    for fault, module in {
        "branch": "Cut", "trunk": "Cut", "inside": "fc2", "row": "tokens",
    }.items():  # fmt: skip
        report = bisect(run, [fault], net=Cut)
        assert report.modules == (module,), str(report)
    model, _, step = undoing(program(net=Cut))
    report = tap.bisect(step, model, run)
    assert report.modules == ("fc2",), str(report)
    assert "fc2.weight after the step, which has not changed it" in report.faults[0].what
    model, opt, step = program(net=Cut)
    opt.param_groups[0]["lr"] = 0.0
    opt.param_groups[0]["weight_decay"] = 0.0
    assert tap.bisect(step, model, run).modules == ("(optimizer)",)
    assert bisect(run, net=Cut)


class Random(nn.Module):
    """Dropout, a module in place, and one that is called twice."""

    def __init__(self, faults=()):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 6)
        self.act = nn.LeakyReLU(0.2 if "act" in faults else 0.1, inplace=True)
        self.drop1 = nn.Dropout(0.5)
        self.drop2 = nn.Dropout(0.4 if "drop2" in faults else 0.5)

    def forward(self, x):
        h = self.fc(x)
        self.act(h)  # in place: the result is not used
        return self.drop2(self.fc(self.drop1(h)))


def random_step(model, seed):
    def step():
        torch.manual_seed(seed)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        model(x).square().mean().backward()

    return step


def test_random_numbers_in_place_and_repeated_calls(tmp_path):
    model = Random()
    run = record(tmp_path, made=(model, None, random_step(model, 7)))

    def found(faults=(), seed=7):
        model = Random(faults)
        return tap.bisect(random_step(model, seed), model, run)

    report = found()
    assert report
    assert report.judged["outputs"] == 6  # the layer is called twice
    assert found(["act"]).modules == ("act",)
    assert found(["drop2"]).modules == ("drop2",)
    assert set(found(["act", "drop2"]).modules) == {"act", "drop2"}
    other = found(["act"], seed=8)
    assert other.modules == ("act",)
    assert [each.module for each in other.unsure] == ["drop1", "drop2"]
    assert "same random state" in other.notes[-1]


def test_memory_order_accumulation_and_autocast(tmp_path):
    """The output of attention is transposed in memory, on which the mask of a dropout depends."""

    def made(eps):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        model.norm2.eps = eps
        x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))

        def step():
            torch.manual_seed(5)
            for part in x.chunk(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(part).float().square().mean()
                loss.backward()

        return model, None, step

    run = record(tmp_path, made=made(1e-5))
    for eps, wrong in ((1e-5, ()), (1e-2, ("norm2",))):
        model, _, step = made(eps)
        report = tap.bisect(step, model, run)
        assert report.modules == wrong, str(report)
        assert report.unsure == ()
        assert report.judged["gradients of weights"] == 12


def test_a_module_that_raises_is_the_last_that_is_judged(reference):
    text = torch.randint(11, (3, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    model = Net(["residual", "eps"])
    model.blocks[1].mlp[2] = nn.Linear(3, WIDTH)  # as if transposed

    def step():
        logits = model(text[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()

    report = tap.bisect(step, model, reference)
    assert report.modules == ("blocks.0.norm1", "blocks.1", "blocks.1.mlp.2")
    assert "raised RuntimeError: mat1 and mat2" in report.faults[2].comparison.reason
    assert "what follows the error in blocks.1.mlp.2 was not judged" in report.notes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_errors(reference):
    model, _, step = program()

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tap.bisect(fail, model, reference)
    with pytest.raises(tap.TensortapError, match="no step 9; the nearest captured step is 2"):
        tap.bisect(step, model, reference, step=9)
    _, _, step = program()
    with pytest.raises(tap.TensortapError, match="nothing was judged: the step calls no module"):
        tap.bisect(step, Net(), reference)


_LAYOUTS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.bisect.test_bisect import PLAIN, Plain

mesh = init_device_mesh("cpu", (world,))

def made(kind, faults=()):
    model = Plain(faults)
    if kind == "tp":
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh, styles)
    else:
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    eps = 1e-3 if "optimizer" in faults else 1e-8
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    x = x.chunk(world)[rank] if kind == "fsdp" else x

    def step():
        model(x).square().mean().backward()
        opt.step()

    return model, opt, step

runs = {}
for kind in ("tp", "fsdp"):
    model, opt, step = made(kind)
    runs[kind] = str(tap.init(folder))
    with tap.track(model, optimizer=opt, tensors=True, kind="all") as tracker:
        step()
        tracker.step()
    tap.finish()
dist.barrier()
found = []
for kind in ("tp", "fsdp"):  # the same layout: each rank by its own records
    for faults in ((), ("act", "optimizer"), ("glue",)):
        model, opt, step = made(kind, faults)
        found.append([kind, faults, tap.bisect(step, model, runs[kind], atol=1e-6).modules])
model, opt, step = made("same", ("act", "optimizer"))  # by one process: shards of the whole
found.append(["one", ("act", "optimizer"), tap.bisect(step, model, single, atol=1e-6).modules])
result = [runs, found]
"""
PLAIN = {"act": "act", "glue": "Plain", "optimizer": "(optimizer)"}


class Plain(nn.Module):
    def __init__(self, faults=()):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.act = nn.ReLU() if "act" in faults else nn.GELU()
        self.norm = nn.LayerNorm(6)
        self.scale = 0.4 if "glue" in faults else 0.5

    def forward(self, x):
        return self.norm(x + self.scale * self.down(self.act(self.up(x))))


def plain(faults=()):
    model = Plain(faults)
    eps = 1e-3 if "optimizer" in faults else 1e-8
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

    def step():
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()

    return model, opt, step


@pytest.mark.slow
def test_reference_of_another_layout(gloo, tmp_path):
    single = record(tmp_path, made=plain())
    head = (
        f"sys.path.insert(0, {str(ROOT)!r})\nfolder, single = {str(tmp_path)!r}, {str(single)!r}\n"
    )
    runs, found = gloo(head + _LAYOUTS, 2)[0]
    for kind, faults, modules in found:
        assert sorted(modules) == sorted(PLAIN[each] for each in faults), kind
    model, _, step = plain()
    with pytest.raises(tap.TensortapError, match="is of 2 ranks, this program of 1"):
        tap.bisect(step, model, runs["tp"])


Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Parts:
    values: dict
    pair: Pair


class Structured(nn.Module):
    def forward(self, x):
        return Parts({"a": x * 2, "b": [x + 1]}, Pair(x.clone(), None))


class Folded(nn.Module):
    """A module that returns a structure, and modules that are called twice."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.parts = Structured()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        parts = self.parts(self.act(self.fc(x)))
        assert (type(parts), type(parts.pair), parts.pair.second) == (Parts, Pair, None)
        return self.act(self.fc(parts.values["a"] + parts.values["b"][0] - parts.pair.first))


@pytest.mark.parametrize("way", ["plain", "checkpoint", "compiled"])
def test_structures_recomputation_and_compiled_models(tmp_path, way):
    torch.manual_seed(0)
    model, x = Folded(), torch.randn(3, 4)
    given = torch.compile(model, backend="eager", fullgraph=True) if way == "compiled" else model

    def step(run=given):
        model.zero_grad()
        if way == "checkpoint":
            run = functools.partial(checkpoint, model, use_reentrant=False)
        run(x.clone().requires_grad_()).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])

    found = []
    with tap.track(model, tensors=True, kind="all", to=tmp_path) as tracker:
        step(model)
        tracker.step()
    assert tap.bisect(step, given, tracker.path)
    assert all(map(torch.equal, *found))  # equal values change no bit
    with torch.no_grad():
        model.fc.weight.mul_(-3)
    assert tap.bisect(step, given, tracker.path).modules == ("fc",)
