"""Tensor-parallel models on two ranks: every output is seen, with its placement."""

import json

import pytest

import tensortap as tap

pytestmark = pytest.mark.slow

_MODEL = """
import torch, tensortap as tap
from torch import nn

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)
    def forward(self, x):
        return self.down(self.act(self.up(x)))

class Attn(nn.Module):  # code between its layers works on the heads of this rank
    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.o(torch.tanh(self.q(x)))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(8), Attn(), Mlp()
    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)

def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())

def train(net, tensors, folder):
    tap.init(folder)
    opt = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    with tap.track(net, optimizer=opt, tensors=tensors, alerts=True) as tracker:
        for n in range(2):
            net(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
            tracker.step()
    return tracker
"""

_PARALLEL = (
    _MODEL
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (2,))
result = {}
for tensors in (True, False):
    net = model()
    for block in net:
        parallelize_module(block, mesh, {
            "attn.q": ColwiseParallel(), "attn.o": RowwiseParallel(),
            "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(),
        })
    if not tensors:  # without tensors: also a wrong one, which lacks an all-reduce
        net[1].mlp.down.register_forward_hook(lambda m, args, out: out + rank)
    tracker = train(net, tensors, os.environ["RUNS"] + str(tensors))
    assert tap.flush(300)  # the machine may be loaded
    result[str(tensors)] = dict(unseen=tracker.unseen, errors=tap.receipt().reasons["error"])
    dist.barrier()
    tap.finish()
"""
)

_OUTPUTS = ["norm", "attn.q", "attn.o", "attn", "mlp.up", "mlp.act", "mlp.down", "mlp"]


@pytest.fixture(scope="module")
def runs(gloo, tmp_path_factory):
    """The results of two ranks, and the runs of them and of one process."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    found = gloo(_PARALLEL, RUNS=str(folder / "two"))
    namespace = {}
    exec(_MODEL, namespace)
    paths = {}
    for tensors in (True, False):
        (paths["two", tensors],) = (folder / f"two{tensors}").iterdir()
        namespace["train"](namespace["model"](), tensors, folder / f"one{tensors}")
        tap.finish()
        (paths["one", tensors],) = (folder / f"one{tensors}").iterdir()
    return found, paths


def test_every_output_is_seen_with_its_placement(runs):
    results, paths = runs
    records = [r for r in tap.open(paths["two", True]).records() if r.step == 0]
    for rank, found in enumerate(results):
        assert found["True"] == {"unseen": {}, "errors": 0}
        own = [r for r in records if r.rank == rank]
        outputs = [r.name for r in own if r.kind.value == "Activation"]
        assert outputs == [
            *(f"0.{name}" for name in _OUTPUTS), "0",
            *(f"1.{name}" for name in _OUTPUTS), "1", "Sequential",
        ]  # fmt: skip
        assert sorted(r.name for r in own if r.kind.value == "Gradient") == sorted(outputs)
        placements = {r.name: r.tags.get("placements") for r in own}
        assert {name: placements[f"0.{name}"] for name in _OUTPUTS} == {
            "norm": "?", "attn.q": "S(2)", "attn.o": "R", "attn": "R", "mlp.up": "S(2)",
            "mlp.act": "S(2)", "mlp.down": "R", "mlp": "R",
        }  # fmt: skip


def test_correct_run_agrees_with_one_process(runs):
    _, paths = runs
    report = tap.compare(paths["two", True], paths["one", True], rtol=1e-4, atol=1e-6)
    assert report, str(report)
    assert report.compared > 100
    assert not report.missing
    assert not report.unplaced
    assert tap.compare(paths["two", True], paths["two", True])


def test_wrong_layer_is_found_by_statistics(runs):
    _, paths = runs
    report = tap.compare(paths["two", False], paths["one", False], rtol=1e-4, atol=1e-6)
    assert not report
    assert report.first.key.name == "1.mlp.down"
    assert json.dumps(report.to_json())
