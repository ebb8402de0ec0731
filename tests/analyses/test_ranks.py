"""Analyses of a model that several ranks train, with gloo."""

import math

import pytest

pytestmark = pytest.mark.slow

_PROGRAM = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

class Mixture(nn.Module):
    # a gate, and experts of which each token takes two
    def __init__(self):
        super().__init__()
        self.num_experts, self.top_k = 3, 2
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x):
        self.logits = self.gate(x)
        return sum(self.logits.softmax(-1)[:, i, None] * e(x) for i, e in enumerate(self.experts))

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Mixture())

def local(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().double()

def squares(tensors):
    return sum(float(local(tensor).square().sum()) for tensor in tensors)

ALL = ["norms", "updates", "noise", "activations", "experts"]

def train(net, micro=1, analyses=ALL):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(rank)
    old = {}
    with tap.track(net, optimizer, analyses=analyses) as tracker:
        for step in range(2):
            optimizer.zero_grad()
            for _ in range(micro):
                net(torch.randn(4, 6)).square().mean().backward()
            computed = squares(p.grad for p in net.parameters())
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            used = squares(p.grad for p in net.parameters())
            old = [local(p).clone() for p in net.parameters()]
            optimizer.step()
            tracker.step()
    moved = squares(local(p) - before for p, before in zip(net.parameters(), old))
    logits = [m for m in net.modules() if isinstance(m, Mixture)][0].logits.detach().double()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    tokens = torch.bincount(logits.topk(2).indices.flatten(), minlength=3)
    records = [r for r in tracker.records if r.kind == "Health" and r.step == 1]
    return dict(
        found={r.name: r.value for r in records}, computed=computed, used=used,
        placements=sorted({r.tags.get("placements", "") for r in records}),
        weights=squares(net.parameters()), moved=moved, unseen=tracker.unseen,
        entropy=float(entropy), tokens=tokens.tolist(),
        finals=[local(p).ravel().tolist() for p in net.parameters()],
    )

def ddp(**options):
    return train(nn.parallel.DistributedDataParallel(model()), **options)

def accumulated():
    return ddp(micro=2)

def sharded(**options):
    net, mesh = model(), init_device_mesh("cpu", (world,))
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh)
    return train(net, **options)

def plain():
    return {each.__name__: each(analyses=False)["finals"] for each in (ddp, sharded)}

def first_noise():
    # by hand: gradients of one step, before and after the average over ranks
    net = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    torch.manual_seed(rank)
    own = []
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: own.append(gradient.clone()))
    with tap.track(net, optimizer, analyses=["noise"]) as tracker:
        net(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        tracker.step()
    found = {r.name: r.value for r in tracker.records if r.kind == "Health"}
    one, mean = squares(own), squares(p.grad for p in net.parameters())
    signal = (world * mean - one) / (world - 1)
    noise = (one - mean) / (1 - 1 / world)
    return dict(found=found, signal=signal, noise=noise)

result = {each.__name__: each() for each in (ddp, accumulated, sharded, plain, first_noise)}
result["errors"] = tap.receipt().reasons["error"]
"""


@pytest.fixture(scope="module")
def found(gloo):
    return gloo(_PROGRAM, world=2)


def close(number):
    return pytest.approx(number, rel=1e-12, abs=0.0)


@pytest.mark.parametrize("layout", ["ddp", "accumulated", "sharded"])
def test_numbers_of_ranks(found, layout):
    for rank in found:
        assert rank["errors"] == 0
        assert list(rank[layout]["unseen"]) == (["noise"] if layout == "sharded" else [])
        numbers, by_hand = rank[layout]["found"], rank[layout]
        assert numbers["model.grad_norm"] == close(math.sqrt(by_hand["computed"]))
        assert numbers["model.grad_norm_used"] == close(math.sqrt(by_hand["used"]))
        assert numbers["model.weight_norm"] == close(math.sqrt(by_hand["weights"]))
        assert numbers["model.update_norm"] == close(math.sqrt(by_hand["moved"]))
        tokens = [numbers[f"2.gate.tokens_{i}"] for i in range(3)]
        assert sum(tokens) == 4 * 2 * (2 if layout == "accumulated" else 1)
        if layout != "accumulated":
            assert tokens == by_hand["tokens"]
            assert numbers["2.gate.router_entropy"] == close(by_hand["entropy"])
        assert 1 <= numbers["0.effective_rank"] <= 4
        assert numbers["1.kurtosis"] > 1


@pytest.mark.parametrize("layout", ["ddp", "accumulated"])
def test_gradients_of_replicas_are_seen_after_their_average(found, layout):
    for rank in found:
        numbers = rank[layout]["found"]
        assert "model.noise_scale" in numbers or numbers["model.grad_signal"] < 0
    assert found[0][layout]["computed"] == found[1][layout]["computed"]
    noises = [rank[layout]["found"]["model.grad_noise"] for rank in found]
    assert noises[0] != noises[1]  # each rank has its own gradients


@pytest.mark.parametrize("layout", ["ddp", "sharded"])
def test_training_of_ranks_is_bit_identical(found, layout):
    for rank in found:
        assert rank[layout]["finals"] == rank["plain"][layout]


def test_noise_of_replicas(found):
    for rank in found:
        by_hand = rank["first_noise"]
        for quantity in ("signal", "noise"):
            assert by_hand["found"][f"model.grad_{quantity}"] == close(by_hand[quantity])


def test_norms_of_shards_add_up(found):
    parts = [rank["sharded"] for rank in found]
    for part in parts:
        assert part["placements"] == ["", "S(0)"]  # outputs are not sharded
    for quantity, whole in (("grad_norm", "computed"), ("grad_norm_used", "used")):
        total = sum(part["found"][f"model.{quantity}"] ** 2 for part in parts)
        assert total == close(sum(part[whole] for part in parts))
    whole = math.sqrt(sum(part["found"]["model.grad_norm_used"] ** 2 for part in parts))
    assert whole == pytest.approx(1e-3, rel=1e-4)  # what the gradients were clipped to
