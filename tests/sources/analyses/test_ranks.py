"""Analyses of a model that several ranks train, with gloo."""

import math

import pytest

pytestmark = pytest.mark.slow

_PROGRAM = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

def local(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().double()

def squares(tensors):
    return sum(float(local(tensor).square().sum()) for tensor in tensors)

def train(net, micro=1):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(rank)
    with tap.track(net, optimizer, analyses=["norms", "updates", "noise"]) as tracker:
        for step in range(2):
            optimizer.zero_grad()
            for _ in range(micro):
                net(torch.randn(4, 6)).square().mean().backward()
            computed = squares(p.grad for p in net.parameters())
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            used = squares(p.grad for p in net.parameters())
            optimizer.step()
            tracker.step()
    records = [r for r in tracker.records if r.kind == "Health" and r.step == 1]
    return dict(
        found={r.name: r.value for r in records}, computed=computed, used=used,
        placements=sorted({r.tags.get("placements", "") for r in records}),
        weights=squares(net.parameters()), unseen=tracker.unseen,
    )

def ddp():
    return train(nn.parallel.DistributedDataParallel(model()))

def accumulated():
    return train(nn.parallel.DistributedDataParallel(model()), micro=2)

def sharded():
    net, mesh = model(), init_device_mesh("cpu", (world,))
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh)
    return train(net)

def first_noise():
    # by hand: gradients of one step, before and after the average over ranks
    net = model()
    torch.manual_seed(rank)
    net(torch.randn(4, 6)).square().mean().backward()
    gradient = torch.cat([p.grad.double().ravel() for p in net.parameters()])
    one = gradient.square().sum()
    dist.all_reduce(gradient)
    mean = (gradient / world).square().sum()
    net = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    torch.manual_seed(rank)
    with tap.track(net, optimizer, analyses=["noise"]) as tracker:
        net(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        tracker.step()
    found = {r.name: r.value for r in tracker.records if r.kind == "Health"}
    signal = (world * mean - one) / (world - 1)
    noise = (one - mean) / (1 - 1 / world)
    return dict(found=found, signal=float(signal), noise=float(noise))

result = {each.__name__: each() for each in (ddp, accumulated, sharded, first_noise)}
result["errors"] = tap.receipt().reasons["error"]
"""


@pytest.fixture(scope="module")
def found(gloo):
    return gloo(_PROGRAM, world=2)


@pytest.mark.parametrize("layout", ["ddp", "accumulated"])
def test_gradients_of_replicas_are_seen_after_their_average(found, layout):
    for rank in found:
        numbers = rank[layout]["found"]
        assert numbers["model.grad_norm"] == pytest.approx(math.sqrt(rank[layout]["computed"]))
        assert numbers["model.grad_norm_used"] == pytest.approx(math.sqrt(rank[layout]["used"]))
        assert "model.noise_scale" in numbers or numbers["model.grad_signal"] < 0
        assert (rank["errors"], rank[layout]["unseen"]) == (0, {})
    assert found[0][layout]["computed"] == found[1][layout]["computed"]
    noises = [rank[layout]["found"]["model.grad_noise"] for rank in found]
    assert noises[0] != noises[1]  # each rank has its own gradients


def test_noise_of_replicas(found):
    for rank in found:
        by_hand = rank["first_noise"]
        for quantity in ("signal", "noise"):
            number = by_hand["found"][f"model.grad_{quantity}"]
            assert number == pytest.approx(by_hand[quantity], rel=1e-5)


def test_norms_of_shards_add_up(found):
    parts = [rank["sharded"] for rank in found]
    for part in parts:
        assert part["placements"] == ["S(0)"]
        numbers = part["found"]
        assert numbers["model.grad_norm_used"] ** 2 == pytest.approx(part["used"])
        assert numbers["model.weight_norm"] ** 2 == pytest.approx(part["weights"])
        assert "model.grad_norm" not in numbers
    whole = math.sqrt(sum(part["found"]["model.grad_norm_used"] ** 2 for part in parts))
    assert whole == pytest.approx(1e-3, rel=1e-4)  # what the gradients were clipped to
