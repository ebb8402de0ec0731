"""Statistics of whole tensors: those of several ranks, merged, are those of one process."""

import numpy as np
import pytest

import tensortap as tap
from tensortap.runs.rows import STATISTICS

pytestmark = pytest.mark.slow

# whole numbers and powers of two, so that no sum depends on its order
_MODEL = """
import torch, tensortap as tap
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act = Shift(), nn.Linear(5, 8), nn.ReLU()
        self.down, self.out = nn.Linear(8, 4), nn.Linear(4, 3)
    def forward(self, x):
        return self.out(self.down(self.act(self.up(self.norm(x)))))

class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(5))
    def forward(self, x):
        return x + self.shift

def model():
    net = Net().double()
    draw = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.data = torch.randint(-3, 4, parameter.shape, generator=draw).double()
    return net

def batch():
    return torch.randint(-4, 5, (8, 5), generator=torch.Generator().manual_seed(1)).double()

def train(net, x, folder, scale=1.0):
    tap.init(folder)
    opt = torch.optim.SGD(net.parameters(), lr=0.25, momentum=0.5)
    with tap.track(net, optimizer=opt, name="net", tensors=True) as tracker:
        for n in range(2):
            (net(x).sum() * scale).backward()
            opt.step()
            opt.zero_grad()
            tracker.step()
    assert tracker.unseen == {}, tracker.unseen
"""

_RANKS = (
    _MODEL
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def fsdp(net, mesh):
    for part in (net.up, net.down, net.out, net):
        fully_shard(part, mesh=mesh)
    return net

def split(net, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(net, mesh, plan)

world = init_device_mesh("cpu", (4,))
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
mine = lambda parts, index: batch().chunk(parts)[index]
layouts = {
    "ddp": lambda: (nn.parallel.DistributedDataParallel(model()), mine(4, rank)),
    "fsdp": lambda: (fsdp(model(), world), mine(4, rank)),
    "hsdp": lambda: (fsdp(model(), grid), mine(4, rank)),
    "tp_fsdp": lambda: (fsdp(split(model(), grid["tp"]), grid["dp"]), mine(2, rank // 2)),
    "tp": lambda: (split(model(), world), batch()),
}
for name, make in layouts.items():
    train(*make(), os.environ["RUNS"] + name)
    assert tap.flush(300)
    dist.barrier()
    tap.finish()
result = {}
"""
)
# over how many parts of the batch the gradients of weights are averaged
_PARTS = {"ddp": 4, "fsdp": 4, "hsdp": 4, "tp_fsdp": 2, "tp": 1}


@pytest.fixture(scope="module")
def runs(gloo, tmp_path_factory):
    """Return the run of each layout, and of one process by the scale of its loss."""
    folder = tmp_path_factory.mktemp("whole")
    gloo(_RANKS, world=4, RUNS=f"{folder}/")
    namespace = {}
    exec(_MODEL, namespace)
    found = {}
    for scale in (1.0, 0.5, 0.25):
        namespace["train"](namespace["model"](), namespace["batch"](), folder / str(scale), scale)
        tap.finish()
    for layout in folder.iterdir():
        (path,) = layout.iterdir()
        found[layout.name] = tap.open(path)
    return found


@pytest.mark.parametrize("layout", _PARTS)
def test_whole_tensors_are_those_of_one_process(runs, layout):
    one = {scale: runs[str(scale)].stats() for scale in (1.0, 1 / _PARTS[layout])}
    found = runs[layout].stats().set_index(["kind", "name", "step", "call"])
    assert found.index.is_unique
    seen = set()
    for row in one[1 / _PARTS[layout]].itertuples():
        key = row.kind, row.name, row.step, row.call
        if row.kind not in (
            "Activation",
            "Gradient",
            "Weight",
            "Weight_Gradient",
            "Optimiser_State",
        ):
            continue
        if row.kind == "Gradient":  # of the loss of one rank, which is not averaged
            same = one[1.0]
            same = same[(same.kind == row.kind) & (same.name == row.name) & (same.step == row.step)]
            if row.step:
                continue  # the weights of that run differ by then
            row = next(same.itertuples())
        for statistic in STATISTICS:
            np.testing.assert_allclose(
                found.loc[key, statistic], getattr(row, statistic), rtol=1e-12, err_msg=str(key)
            )
        seen.add(key)
    assert len(seen) > 40


@pytest.mark.parametrize("layout", _PARTS)
def test_correct_layouts_agree_with_one_process(runs, layout):
    kinds = ["Activation", "Weight", "Weight_Gradient", "Optimiser_State"]
    one = runs[str(1 / _PARTS[layout])]
    report = tap.compare(runs[layout], one, kinds=kinds)
    assert report, str(report)
    assert not report.unplaced
    assert tap.compare(runs[layout], runs[layout])
