"""Programs that train one small model in many layouts, for `test_whole`."""

# whole numbers and powers of two, so that no sum depends on its order
MODEL = """
import torch, tensortap as tap
from torch import nn

class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(5))
    def forward(self, x):
        return x + self.shift

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 5, 5))
    def forward(self, tokens, chosen):
        weight = self.weight
        mine = weight.to_local() if hasattr(weight, "to_local") else weight
        first = len(mine) * (rank if hasattr(weight, "to_local") else 0)
        parts = [tokens[chosen == first + i] @ each for i, each in enumerate(mine)]
        return torch.cat(parts)

class Moe(nn.Module):  # every rank has its own batch and some of the experts
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(5, 8, bias=False), Experts()
    def forward(self, x):
        split = hasattr(self.experts.weight, "to_local")
        tokens = x.reshape(-1, 5)
        chosen = self.router(tokens).detach().argmax(1)
        tokens = Gather.apply(tokens) if split else tokens
        if split:
            everywhere = [torch.empty_like(chosen) for _ in range(world)]
            dist.all_gather(everywhere, chosen)
            chosen = torch.cat(everywhere)
        per = 8 // (world if split else 1)
        order = torch.argsort(chosen, stable=True)
        order = order[chosen[order] // per == (rank if split else 0)]
        out = torch.zeros_like(tokens).index_copy(0, order, self.experts(tokens, chosen))
        return (Scatter.apply(out) if split else out).reshape(x.shape)

class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)
    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(world)[rank]

class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x.chunk(world)[rank]
    @staticmethod
    def backward(ctx, gradient):
        parts = [torch.empty_like(gradient) for _ in range(world)]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts)

class Net(nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.norm, self.q_proj, self.act = Shift(), nn.Linear(5, 8), nn.ReLU()
        self.moe = Moe() if moe else None
        self.o_proj, self.out = nn.Linear(8, 4), nn.Linear(4, 3)
    def forward(self, x):
        x = self.norm(x)
        if self.moe is not None:
            x = self.moe(x)
        return self.out(self.o_proj(self.act(self.q_proj(x))))

def model(moe=False):
    net = Net(moe).double()
    draw = torch.Generator().manual_seed(0)
    most = 1 if moe else 3  # products of more layers would need more than 53 bits
    for parameter in net.parameters():
        parameter.data = torch.randint(-most, most + 1, parameter.shape, generator=draw).double()
    return net

def batch():
    return torch.randint(-4, 5, (8, 8, 5), generator=torch.Generator().manual_seed(1)).double()

def backward(net, x, scale, parts=1):
    for part in x.chunk(parts):
        (net(part).sum() * scale).backward()

def train(net, folder, look, **options):
    tap.init(folder)
    opt = torch.optim.SGD(net.parameters(), lr=0.25, momentum=0.5)
    options = {"tensors": True, **options}
    with tap.track(net, optimizer=opt, name="net", **options) as tracker:
        for n in range(2):
            look(net)
            opt.step()
            opt.zero_grad()
            tracker.step()
    assert tracker.unseen == {}, tracker.unseen
"""

RANKS = (
    MODEL
    + """
from functools import partial
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module,
)

def fsdp(net, mesh):
    for part in (net.q_proj, net.o_proj, net.out, net):
        fully_shard(part, mesh=mesh)
    return net

def split(net, mesh, sequence=False):
    plan = {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(), "q_proj": ColwiseParallel(input_layouts=Shard(1)),
            "o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "out": SequenceParallel(use_local_output=True),
        }
    return parallelize_module(net, mesh, plan)

def with_batch(net, parts, index, dim=0):
    return net, lambda net: backward(net, batch().chunk(parts, dim)[index], 1.0)

def experts():
    net = model(moe=True)
    weight, mesh = net.moe.experts.weight, init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    net.moe.experts.weight = nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(0)]))
    def look(net):
        backward(net, batch().chunk(world)[rank], 1.0)
        for parameter in net.parameters():
            if parameter.grad is not None:  # the router chooses, which has no gradient
                if parameter is not net.moe.experts.weight:
                    dist.all_reduce(parameter.grad)
                parameter.grad /= world
    return net, look

def stages():
    begin = ["o_proj"] if world == 2 else ["q_proj", "o_proj", "out"]
    half = torch.zeros(4, 8, 5).double()
    spec = {name: SplitPoint.BEGINNING for name in begin}
    pipe = pipeline(model(), (half,), split_spec=spec)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.sum(), scale_grads=False)
    def look(net):
        schedule.step(batch()) if rank == 0 else schedule.step(target=torch.zeros(8))
    return stage.submod, look

flat = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
tensor = init_device_mesh("cpu", (world,))
grid = init_device_mesh("cpu", (max(world // 2, 1), min(world, 2)), mesh_dim_names=("dp", "tp"))
layouts = {
    "ddp": lambda: with_batch(nn.parallel.DistributedDataParallel(model()), world, rank),
    "fsdp": lambda: with_batch(fsdp(model(), flat), world, rank),
    "hsdp": lambda: with_batch(fsdp(model(), grid), world, rank),
    "tp_fsdp": lambda: with_batch(
        fsdp(split(model(), grid["tp"]), grid["dp"]), len(grid.mesh), rank // 2
    ),
    "tp": lambda: with_batch(split(model(), tensor), 1, 0),
    "sp": lambda: with_batch(split(model(), tensor, sequence=True), world, rank, 1),
    "pp": stages,
    "ep": experts,
}

def spoil(net):
    # one rank has a wrong weight
    weight = dict(net.named_parameters()).get("o_proj.weight")
    if weight is not None and rank == BAD:
        with torch.no_grad():
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local[..., 0] += 64

BAD = 1
for name in os.environ["LAYOUTS"].split():
    layout, _, how = name.partition("-")
    net, look = layouts[layout]()
    if how == "bug":
        spoil(net)
    options = {"tensors": False, "digests": True} if how == "digests" else {}
    train(net, os.environ["RUNS"] + f"{name}-{world}", look, **options)
    assert tap.flush(300)
    dist.barrier()
    tap.finish()
result = {}
"""
)
