"""Models that are spread over several processes, with gloo."""

import pytest

pytestmark = pytest.mark.slow

_PROGRAM = """
def rows(tracker):
    return [
        dict(
            name=r.name, kind=r.kind.value, step=r.step, call=r.call, rank=r.rank,
            world=r.world_size, shape=r.shape, tags=r.tags, mean=r.stats.mean,
            count=r.stats.count, errors=tap.receipt().reasons["error"],
            shard=r.shard and [r.shard.global_shape, r.shard.offsets, r.shard.placements],
        )
        for r in tracker.records if r.stats
    ]

def ddp():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(4, 4)
        def forward(self, x):
            return self.module(x)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(Inner(), nn.Linear(4, 2)))
    opt = torch.optim.Adam(model.parameters())
    with tap.track(model, optimizer=opt) as tracker:
        for n in range(2):
            model(torch.full((3, 4), rank + 1.0)).sum().backward()
            opt.step()
            opt.zero_grad()
            tracker.step()
    return rows(tracker)

def fsdp2():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    opt = torch.optim.Adam(model.parameters())
    with tap.track(model, optimizer=opt) as tracker:
        for n in range(2):
            model(torch.full((3, 4), rank + 1.0)).sum().backward()
            opt.step()
            opt.zero_grad()
            tracker.step()
        expected = {
            name: p.to_local().mean().item() for name, p in model.named_parameters()
        }
    return [rows(tracker), expected]

def dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, Replicate, distribute_tensor
    mesh = init_device_mesh("cpu", (2,))
    class Spread(nn.Module):
        def forward(self, x):
            return x * 2
    model = nn.Sequential(Spread())
    x = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)]).requires_grad_()
    with tap.track(model) as tracker:
        model(x).sum().backward()
        tracker.step()
    return rows(tracker)

def watch():
    import threading
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    result = {}
    for which in (0, "all"):
        path = f"{os.environ['FILMS']}-{which}-{rank}"
        def film(record):
            with open(path, "a") as file:
                file.write(f"{record.name} {record.rank}\\n")
        with tap.watch(model, film, rate=None, start_method="fork", rank=which) as watcher:
            model(torch.randn(2, 4)).sum().backward()
            worker = watcher.pid
        films = sorted(open(path).read().split("\\n")[:-1]) if os.path.exists(path) else []
        result[str(which)] = [worker is not None, films]
    return result

result = {each.__name__: each() for each in (ddp, fsdp2, dtensor, watch)}
"""


@pytest.fixture(scope="module")
def found(gloo, tmp_path_factory):
    """What two ranks have found; they run all programs one after the other."""
    return gloo(_PROGRAM, FILMS=str(tmp_path_factory.mktemp("films") / "film"))


def test_ddp(found):
    found = [results["ddp"] for results in found]
    for rank, rows in enumerate(found):
        assert {(r["rank"], r["world"], r["errors"]) for r in rows} == {(rank, 2, 0)}
        outputs = [(r["name"], r["step"]) for r in rows if r["kind"] == "Activation"]
        names = ["0.module", "0", "1", "Sequential"]
        assert outputs == [(name, step) for step in range(2) for name in names]
        weights = [r["name"] for r in rows if r["kind"] == "Weight" and r["step"] == 1]
        assert weights == ["0.module.weight", "0.module.bias", "1.weight", "1.bias"]
        gradients = [r for r in rows if r["kind"] == "Gradient"]
        assert len(gradients) == 8
    # weight gradients are reduced over ranks, outputs are not
    weight_gradients = [
        [r["mean"] for r in rows if r["kind"] == "Weight_Gradient"] for rows in found
    ]
    assert weight_gradients[0] == weight_gradients[1]
    assert len(weight_gradients[0]) == 8
    outputs = [[r["mean"] for r in rows if r["kind"] == "Activation"] for rows in found]
    assert outputs[0] != outputs[1]


def test_fsdp2(found):
    found = [results["fsdp2"] for results in found]
    for rank, (rows, expected) in enumerate(found):
        assert {r["errors"] for r in rows} == {0}
        weights = {r["name"]: r for r in rows if r["kind"] == "Weight" and r["step"] == 1}
        assert set(weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        for name, row in weights.items():
            assert row["mean"] == pytest.approx(expected[name], rel=1e-5)
        first = weights["0.weight"]
        assert first["shape"] == [3, 4]
        assert first["shard"][:2] == [[6, 4], [3 * rank, 0]]
        assert first["tags"]["placements"] == "S(0)"
        assert first["tags"]["mesh"] == f"dim0={rank}/2"
        for kind, count in (("Weight_Gradient", 8), ("Optimiser_State", 24), ("Gradient", 8)):
            assert len([r for r in rows if r["kind"] == kind]) == count
        state = next(r for r in rows if r["name"] == "0.weight.exp_avg")
        assert state["shard"][:2] == [[6, 4], [3 * rank, 0]]
        assert [r["name"] for r in rows if r["kind"] == "Activation"][:4] == [
            "0", "1", "2", "Sequential",
        ]  # fmt: skip


def test_outputs_that_are_dtensors(found):
    found = [results["dtensor"] for results in found]
    for rank, rows in enumerate(found):
        outputs = [r for r in rows if r["name"] == "0"]
        assert [r["kind"] for r in outputs] == ["Activation", "Gradient"]
        assert {r["errors"] for r in rows} == {0}
        assert outputs[0]["shape"] == [[3, 2], [2, 2]][rank]
        assert outputs[0]["shard"][:2] == [[5, 2], [3 * rank, 0]]
        assert outputs[0]["mean"] == [5.0, 15.0][rank]


def test_watches_one_rank_or_all(found):
    found = [results["watch"] for results in found]
    one = ["0 0", "1 0", "Sequential 0"]
    assert [r["0"] for r in found] == [[True, one], [False, []]]
    assert [r["all"] for r in found] == [[True, one], [True, ["0 1", "1 1", "Sequential 1"]]]
