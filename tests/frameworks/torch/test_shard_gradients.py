"""The noise of gradients in models of fully_shard, against gradients of a copy on each rank."""

import pytest

pytestmark = pytest.mark.slow

_PROGRAM = """
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

class Scaled(nn.Module):
    # uses the weight of a module that it never calls
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return nn.functional.linear(x, self.inner.weight) * self.scale.sum()

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Scaled(), nn.Sequential(nn.Linear(8, 5)))

def batches(micro):
    torch.manual_seed(rank + 1)
    return [torch.randn(4, 6) for _ in range(micro)]

def loss(net, x):
    return net(x).float().square().mean()

def own_gradients(dtype, micro):
    # of this rank alone, one per micro-batch
    found = []
    for x in batches(micro):
        net = model().to(dtype)
        loss(net, x.to(dtype)).backward()
        found.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
    return found

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def train(net, micro, sync, analyses):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with tap.track(net, optimizer, analyses=analyses) as tracker:
        for step in range(2):
            optimizer.zero_grad()
            for i, x in enumerate(batches(micro)):
                net.set_requires_gradient_sync(sync or i == micro - 1)
                loss(net, x).backward()
            if step == 0:
                means = {name: local(p.grad).double() for name, p in net.named_parameters()
                         if p.grad is not None}
            optimizer.step()
            tracker.step()
    return tracker, means

def part_of(parameter, whole):
    # independently of tensortap: torch splits a tensor of indices in the same way
    indices = torch.arange(whole.numel(), dtype=torch.float64).view(whole.shape)
    own = distribute_tensor(indices, parameter.device_mesh, parameter.placements).to_local()
    return whole.double().flatten()[own.long().flatten()]

def case(
    mesh=None, micro=1, sync=True, dtype=torch.float32, checkpoint=False, factor=None, **options
):
    mesh = mesh or init_device_mesh("cpu", (world,))
    def build():
        net = model()
        if checkpoint:
            checkpoint_wrapper.apply_activation_checkpointing(
                net, check_fn=lambda module: isinstance(module, (nn.Linear, Scaled))
            )
        for module in (net[0], net[2], net):
            fully_shard(module, mesh=mesh, **options)
            if factor:
                module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(True)  # the only one that gloo has
        return net
    net, twin = build(), build()
    own = own_gradients(dtype, micro)
    tracker, means = train(net, micro, sync, ["noise"])
    train(twin, micro, sync, False)
    parts = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in net.named_parameters()}
    means = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in means.items()}
    weight = (world / factor if factor else 1.0) ** 2
    one = {n: weight * sum(float(part_of(parts[n], each[n]).square().sum()) for each in own) / micro
           for n in means}
    mean = {n: float(g.square().sum()) / micro**2 for n, g in means.items()}
    samples = micro * world
    signal = {n: (samples * mean[n] - one[n]) / (samples - 1) for n in means}
    noise = {n: (one[n] - mean[n]) / (1 - 1 / samples) for n in means}
    records = [r for r in tracker.records if r.kind == "Health" and r.step == 0]
    return dict(
        found={r.name: r.value for r in records}, unseen=tracker.unseen,
        placements=sorted({r.tags.get("placements") for r in records}),
        signal=sum(signal.values()), noise=sum(noise.values()),
        ratios={n: signal[n] / noise[n] for n in means if noise[n] > 0},
        same=all(torch.equal(p.to_local(), q.to_local())
                 for p, q in zip(net.parameters(), twin.parameters())),
        names=len(means),
    )

def ignored():
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)), ignored_params={net[0].bias})
    tracker, _ = train(net, 1, True, ["noise"])
    return tracker.unseen.get("noise", "")

def columns(parameter):
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % world == 0 else None

both = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
result = {
    "kept": case(reshard_after_forward=False),
    "resharded": case(reshard_after_forward=True),
    "checkpointed": case(checkpoint=True),
    "accumulated": case(micro=3),
    "unsynchronized": case(micro=3, sync=False),
    "bfloat16": case(dtype=torch.bfloat16, mp_policy=half),
    "bfloat16 unsynchronized": case(dtype=torch.bfloat16, mp_policy=half, micro=2, sync=False),
    "summed": case(factor=1.0),
    "replicated": case(mesh=both),
    "columns": case(shard_placement_fn=columns),
}
result["ignored"] = ignored()
result["errors"] = tap.receipt().reasons["error"]
"""

_CASES = (
    "kept", "resharded", "checkpointed", "accumulated", "unsynchronized", "bfloat16",
    "bfloat16 unsynchronized", "summed", "replicated", "columns",
)  # fmt: skip


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, gloo):
    return gloo(_PROGRAM, world=request.param)


def close(number):
    return pytest.approx(number, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("case", _CASES)
def test_noise_of_shards(ranks, case):
    for rank in ranks:
        assert rank["errors"] == 0
        found = rank[case]
        assert "noise" not in found["unseen"]
        assert found["same"]  # as an untracked twin
        assert found["names"] == 6  # all but the bias that nothing uses
        assert found["found"]["model.grad_signal"] == close(found["signal"])
        assert found["found"]["model.grad_noise"] == close(found["noise"])
        for name, ratio in found["ratios"].items():
            assert found["found"][f"{name}.grad_snr"] == close(ratio)


def test_shards_are_told(ranks):
    for rank in ranks:
        assert rank["kept"]["placements"] == ["S(0)"]
        assert rank["replicated"]["placements"] == ["R S(0)"]


def test_parameters_that_are_not_averaged(ranks):
    for rank in ranks:
        assert rank["ignored"].startswith("left out 1 parameters, such as 0.bias")
